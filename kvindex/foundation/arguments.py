"""How a subcommand reads its own flags: argparse, with one line for a mistake and a suggestion.

It knows no command and no setting; flags that override a setting name it in `metavar`-free form
through `override`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a subcommand: its name, the words after it, and the shared options."""

    command: str
    words: Sequence[str]
    config_file: Path | None = None
    as_json: bool = False


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of exiting, and suggests near flags."""

    def __init__(self, invocation: Invocation, description: str) -> None:
        super().__init__(
            prog=f"prefixfleet {invocation.command}",
            description=description,
            allow_abbrev=False,
        )
        self._words = list(invocation.words)
        self._settings: dict[str, str] = {}

    def override(self, flag: str, setting: str, *, help: str, **options: object) -> None:
        """Add a flag that overrides the setting at a dotted path."""
        action = self.add_argument(flag, help=f"{help} ({setting})", **options)  # type: ignore[arg-type]
        self._settings[action.dest] = setting

    def read(self) -> argparse.Namespace:
        """Parse the words of the invocation; raise ConfigError for any that does not fit."""
        parsed, unknown = self.parse_known_args(self._words)
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
    def _command(self) -> str:
        return self.prog.removeprefix("prefixfleet ")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; see `{self.prog} --help`"
        flag = word.partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        return f"unknown option {flag}{nearest(flag, known)}"
