"""A plan: the flags of a `replay` command in a YAML file, under their own names.

It turns the file into words of a command line, so a plan can say what flags can and nothing else,
and its values are checked where flags are. It knows no flag by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError

_FLAG = "--plan"
_SWITCH = {"true": True, "false": False}


class PlannedParser(CommandParser):
    """A parser that also takes the flags in the file behind `--plan`.

    A flag on the command line wins over the plan's; one that may be repeated adds to it.
    """

    def __init__(self, invocation: Invocation, description: str) -> None:
        super().__init__(invocation, description)
        self.add_argument(
            _FLAG,
            type=Path,
            metavar="FILE",
            help="flags of this command as YAML, such as `replicas: 4`; those given here win "
            "(default: no plan)",
        )

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the plan's words, then `args`; raise ConfigError that names the plan's line."""
        words = list(args or ())
        file = _plan_among(words)
        if file is not None:
            words = [*self._planned(file), *words]
        return super().parse_known_args(words, namespace)

    def _planned(self, file: Path) -> Iterator[str]:
        """Yield the words that a file stands for; raise ConfigError naming its line."""
        seen: set[str] = set()
        for key, value in _entries(file):
            place, name = f"{file}:{key.start_mark.line + 1}", str(key.value)
            action = self._option_string_actions.get(f"--{name}")
            if action is None or name in ("help", "plan"):
                raise ConfigError(f"{place}: unknown key {name!r}{nearest(name, self._keys())}")
            if name in seen:
                raise ConfigError(f"{place}: the key {name!r} is given twice")
            seen.add(name)
            yield from _words_of(action, f"--{name}", value, f"{place}: {name}")

    def _keys(self) -> list[str]:
        names = (name.removeprefix("--") for name in self._option_string_actions)
        return [name for name in names if name not in ("-h", "help", "plan")]


def _plan_among(words: Sequence[str]) -> Path | None:
    """Return the file behind `--plan`, None where there is none or the parser has to complain."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(_FLAG, type=Path)
    try:
        file: Path | None = finder.parse_known_args(words)[0].plan
    except argparse.ArgumentError:
        return None
    return file


def _entries(file: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return keys and values as they are written: `10:30` stays text and is no number of YAML's."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FLAG} {file}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{place}: not valid YAML: {problem}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}: expected flags with their values, such as `replicas: 4`")
    return list(root.value)


def _words_of(action: argparse.Action, flag: str, value: yaml.Node, place: str) -> Iterator[str]:
    """Yield a flag with its value; a list repeats the flag, or is joined where it cannot be."""
    if action.nargs == 0:
        switch = _SWITCH.get(value.value) if isinstance(value, yaml.ScalarNode) else None
        if switch is None:
            raise ConfigError(f"{place}: expected true or false")
        if switch:
            yield flag
        return
    texts = [_text(node, place) for node in _items(value)]
    if isinstance(action, argparse._AppendAction):
        yield from (f"{flag}={text}" for text in texts)
    else:
        yield f"{flag}={','.join(texts)}"


def _items(value: yaml.Node) -> list[yaml.Node]:
    return list(value.value) if isinstance(value, yaml.SequenceNode) else [value]


def _text(node: yaml.Node, place: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise ConfigError(f"{place}: expected text, a number, or a list of them")
    return str(node.value)
