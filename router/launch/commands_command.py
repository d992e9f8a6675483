"""`prefixfleet commands reference`: every command with its arguments, as docs/commands.md.

It builds the parser of each command, and runs none of them.
"""

from __future__ import annotations

from kvindex.foundation.arguments import CommandParser, Invocation, parser_of
from kvindex.foundation.command_reference import reference as commands_page
from router.cli import COMMANDS, SHARED_OPTIONS
from router.launch.config import default_of


def reference(invocation: Invocation) -> int:
    """Print every command with its arguments, their meaning and defaults, as Markdown."""
    CommandParser(invocation, "Print every command with its arguments, as Markdown.").read()
    print(page(), end="")
    return 0


def page() -> str:
    """Return the page."""
    parsers = {}
    for name, command in COMMANDS.items():
        asked = Invocation(name, (), default_of=default_of)
        parsers[name] = command.summary, parser_of(command.load(), asked)
    return commands_page(parsers, shared=SHARED_OPTIONS)
