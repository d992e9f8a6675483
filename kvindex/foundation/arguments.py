"""How a subcommand reads its own flags: argparse, with one line for a mistake and a suggestion.

It knows no command and no setting; flags that override a setting name it through `override`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a subcommand: its name, the words after it, and the shared options.

    `default_of` tells the help what the setting at a dotted path is where nobody sets it. With
    `parser_only` a command ends once its parser is there; `parser_of` is for that.
    """

    command: str
    words: Sequence[str]
    config_file: Path | None = None
    as_json: bool = False
    default_of: Callable[[str], str] | None = None
    parser_only: bool = False


class ParserBuilt(Exception):
    """Ends a command of which only the parser is wanted."""

    def __init__(self, parser: CommandParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of exiting, and suggests near flags.

    Its help adds to each argument the setting that it overrides, and the default. Arguments that
    several commands have stand in a group, under the same title everywhere.
    """

    def __init__(self, invocation: Invocation, description: str) -> None:
        self._invocation = invocation
        self._settings: dict[str, str] = {}
        super().__init__(
            prog=f"prefixfleet {invocation.command}",
            description=description,
            allow_abbrev=False,
            formatter_class=partial(_NotingFormatter, note=self._note),
        )

    def override(
        self,
        flag: str,
        setting: str,
        *,
        help: str,
        group: argparse._ArgumentGroup | None = None,
        **options: object,
    ) -> None:
        """Add a flag that overrides the setting at a dotted path."""
        place = self if group is None else group
        action = place.add_argument(flag, help=help, **options)  # type: ignore[arg-type]
        self._settings[action.dest] = setting

    def read(self) -> argparse.Namespace:
        """Parse the words of the invocation; raise ConfigError for any that does not fit."""
        if self._invocation.parser_only:
            raise ParserBuilt(self)
        self.usage = self.call.replace("%", "%%")
        parsed, unknown = self.parse_known_args(self._invocation.words)
        for word in unknown:
            raise ConfigError(f"{self._command}: {self._unknown(word)}")
        return parsed

    def overrides(self, parsed: argparse.Namespace) -> dict[str, object]:
        """Return the settings that flags override, by dotted path; flags not given are absent."""
        values = {path: getattr(parsed, dest) for dest, path in self._settings.items()}
        return {path: value for path, value in values.items() if value is not None}

    def error(self, message: str) -> NoReturn:
        """Turn argparse's own complaints into ours."""
        raise ConfigError(f"{self._command}: {message}; see `{self.prog} --help`")

    @property
    def call(self) -> str:
        """How to call it, in one line: what must be given, and whether there are options."""
        flags = [a for a in self._actions if a.option_strings and a.dest != "help"]
        choices = [group for group in self._mutually_exclusive_groups if group.required]
        words = [self.prog]
        words += [written(action) for action in self._actions if not action.option_strings]
        words += [written(action) for action in flags if action.required]
        words += [f"({' | '.join(map(written, group._group_actions))})" for group in choices]
        if not all(action.required for action in flags):
            words.append("[options]")
        return " ".join(words)

    def parts(self) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        """Yield the arguments of this command alone under None, then each group's by its title."""
        own = (self._positionals, self._optionals)
        actions = [action for group in own for action in group._group_actions]
        yield None, [action for action in actions if action.dest != "help"]
        for group in self._action_groups:
            if group not in own:
                yield group.title, group._group_actions

    def setting_of(self, action: argparse.Action) -> str | None:
        """Return the dotted path of the setting that an argument overrides, None if of none."""
        return self._settings.get(action.dest)

    def default_of(self, action: argparse.Action) -> str | None:
        """Return what holds without an argument, None where nothing does or its help says it."""
        setting = self.setting_of(action)
        if setting is not None:
            default_of = self._invocation.default_of
            return None if default_of is None else default_of(setting)
        value = action.default
        if action.nargs == 0 or value in (None, [], argparse.SUPPRESS):
            return None
        return f"{value:g}" if isinstance(value, float) else str(value)

    def _note(self, action: argparse.Action) -> str:
        default = self.default_of(action)
        parts = [self.setting_of(action), None if default is None else f"default {default}"]
        return ", ".join(filter(None, parts))

    @property
    def _command(self) -> str:
        return self.prog.removeprefix("prefixfleet ")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; see `{self.prog} --help`"
        flag = word.partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        return f"unknown option {flag}{nearest(flag, known)}"


class _NotingFormatter(argparse.HelpFormatter):
    """argparse's own layout, with a note behind the help of each argument."""

    def __init__(self, prog: str, *, note: Callable[[argparse.Action], str]) -> None:
        super().__init__(prog)
        self._note_of = note

    def _get_help_string(self, action: argparse.Action) -> str:
        note = self._note_of(action).replace("%", "%%")
        return f"{action.help} ({note})" if note else action.help or ""

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()


def written(action: argparse.Action) -> str:
    """Return an argument as it is written on a command line, by its long name."""
    flag = action.option_strings[-1] if action.option_strings else ""
    if action.nargs == 0:
        return flag
    choices = action.choices
    name = "{" + ",".join(map(str, choices)) + "}" if choices is not None else action.dest.upper()
    value = action.metavar if isinstance(action.metavar, str) else name
    if action.nargs in (argparse.ONE_OR_MORE, argparse.ZERO_OR_MORE):
        value = f"{value} …"
    if flag:
        return f"{flag} {value}"
    return f"[{value}]" if is_optional(action) else value


def is_optional(action: argparse.Action) -> bool:
    """Tell whether a command can do without an argument."""
    if action.option_strings:
        return not action.required
    return action.nargs in (argparse.OPTIONAL, argparse.ZERO_OR_MORE)


def parser_of(command: Callable[[Invocation], int], invocation: Invocation) -> CommandParser:
    """Return the parser that a command reads its words with; nothing else of it is done."""
    try:
        command(replace(invocation, parser_only=True))
    except ParserBuilt as built:
        return built.parser
    raise AssertionError(f"{invocation.command} reads no words")
