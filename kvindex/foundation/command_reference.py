"""The reference of all commands as Markdown, read off the parsers that read their words.

A command becomes a heading, how it is called, what it does and a table: argument, meaning,
default. What several commands have in common is described once. It knows no command: the parsers,
and the options that all commands share, are arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from kvindex.foundation.arguments import CommandParser, is_optional, written

_PREAMBLE = """# Commands

Everything that the command line takes, as the code has it: `prefixfleet commands reference` prints
this page. `prefixfleet --help` lists the commands, `prefixfleet COMMAND --help` the options of one,
with their defaults. A mistake is one line on standard error that says what would be right; a flag
that nearly exists is suggested.

A default with a setting behind it is that setting's: the [configuration](configuration.md) and the
environment may have changed it.
"""
_SHARED = "## For every command\n\nIn any position:\n"
_EXIT_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | it failed, or what was looked at is not as it should be |
| 2 | the command line or the configuration is wrong |
| 3 | something that it needs does not answer, or is taken: a fleet, Redis, a port, a certificate |
| 4 | a replica would not stay up |
| 130 | interrupted |
"""


def reference(
    parsers: Mapping[str, tuple[str, CommandParser]], *, shared: Mapping[str, str]
) -> str:
    """Describe every command, and the shared options, as a page of Markdown.

    `parsers` maps a command to its summary and parser; commands keep their order.
    """
    groups: dict[str, str] = {}
    sections = [_section(name, parser, groups) for name, (_, parser) in parsers.items()]
    listed = [f"| [{name}](#{_anchor(name)}) | {text} |" for name, (text, _) in parsers.items()]
    options = [f"| `{option}` | {text} |" for option, text in shared.items()]
    return "\n".join(
        [
            _PREAMBLE,
            _table(("command", "what it does"), listed),
            _SHARED,
            _table(("option", "meaning"), options),
            _EXIT_CODES,
            *sections,
            *(f"## Options: {title}\n\n{table}" for title, table in groups.items()),
        ]
    )


def _section(name: str, parser: CommandParser, groups: dict[str, str]) -> str:
    """Describe one command; its groups are added to those that are known already."""
    lines = [f"## {name}\n", f"`{parser.call}`\n", f"{parser.description}\n"]
    links = []
    for title, actions in parser.parts():
        table = _table(
            ("argument", "meaning", "default"), [_row(parser, action) for action in actions]
        )
        if title is None:
            lines += [table] if actions else []
            continue
        known = groups.setdefault(title, table)
        assert table == known, f"{name}: {title!r} has other options than in the command before"
        links.append(f"[{title}](#{_anchor(f'Options: {title}')})")
    if links:
        lines.append(f"And options of several commands: {', '.join(links)}.\n")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, ""])


def _row(parser: CommandParser, action: argparse.Action) -> str:
    names = _cell(", ".join([*action.option_strings[:-1], written(action)]))
    meaning, _, told = (action.help or "").replace("%%", "%").partition(" (default: ")
    default = told.removesuffix(")") or _default(parser, action)
    return f"| `{names}` | {_cell(meaning)} | {default} |"


def _default(parser: CommandParser, action: argparse.Action) -> str:
    """Return what holds where an argument is not given, with the setting that it comes from."""
    default, setting = parser.default_of(action), parser.setting_of(action)
    if default is None:
        return "" if is_optional(action) else "must be given"
    value = f"`{_cell(default)}`"
    if setting is None:
        return value
    section = setting.partition(".")[0]
    return f"{value}, [`{setting}`](configuration.md#{section})"


def _anchor(heading: str) -> str:
    """Return the anchor that a heading gets: lower case, words joined, without punctuation."""
    kept = (c for c in heading.lower() if c.isalnum() or c in " -")
    return "".join(kept).replace(" ", "-")


def _cell(text: str) -> str:
    """Keep a bar inside a cell from ending it."""
    return text.replace("|", "\\|")
