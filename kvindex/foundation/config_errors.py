"""From a decoder's complaint to a sentence: which setting, what is allowed, what was meant.

It reads msgspec's messages and types, and knows neither files nor sections.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from kvindex.foundation.text_forms import form_in_words

SettingPath = tuple[str | int, ...]

_PLACE = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_ENUM = re.compile(r"Invalid enum value (.*)")
_BOUND = re.compile(r"Expected `(int|float)` (>=|>|<=|<) (.+)")
_BOUND_WORDS = {">=": "of at least", ">": "above", "<=": "of at most", "<": "below"}
_PLAIN_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


def dotted(path: SettingPath) -> str:
    """Write a path as a person would: `tenants[0].keys[1].hash`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is closest to `name`, and list them all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(names)}"


def explain(message: str, kind: Any, value: Any) -> tuple[SettingPath, str]:
    """Split a msgspec ValidationError message into the setting's path and a sentence about it.

    `kind` is the type that `value` failed to convert to.
    """
    place = _PLACE.search(message)
    problem = message[: place.start()] if place else message
    steps = _STEP.finditer(place.group(1)) if place else ()
    path = tuple(_step(match) for match in steps)
    node = _type_at(msgspec.inspect.type_info(kind), path)
    if unknown := _UNKNOWN.fullmatch(problem):
        name = unknown.group(1)
        fields = [field.encode_name for field in getattr(node, "fields", ())]
        return (*path, name), f"unknown field{nearest(name, fields)}"
    if missing := _MISSING.fullmatch(problem):
        return (*path, missing.group(1)), "this field is required"
    if enum := _ENUM.fullmatch(problem):
        return path, f"{enum.group(1)} is not allowed; choose one of {_literals(node)}"
    return path, f"{in_words(problem)}{_given(value, path)}"


def _step(match: re.Match[str]) -> str | int:
    name, index = match.groups()
    if name is not None:
        return name
    return int(index) if index is not None else "*"


def _type_at(node: Any, path: SettingPath) -> Any:
    """Follow a path through msgspec's type description; None where it leads nowhere."""
    node = _without_null(node)
    for step in path:
        if isinstance(node, msgspec.inspect.StructType):
            node = next((f.type for f in node.fields if f.encode_name == step), None)
        elif isinstance(node, msgspec.inspect.DictType):
            node = node.value_type
        else:
            node = getattr(node, "item_type", None)
        node = _without_null(node)
    return node


def _without_null(node: Any) -> Any:
    if not isinstance(node, msgspec.inspect.UnionType):
        return node
    others = [t for t in node.types if not isinstance(t, msgspec.inspect.NoneType)]
    return others[0] if len(others) == 1 else node


def _literals(node: Any) -> str:
    values = getattr(node, "values", ())
    return ", ".join(str(value) for value in values)


def in_words(problem: str) -> str:
    """Say in words what msgspec expected, and what it got."""
    if bound := _BOUND.fullmatch(problem):
        kind, sign, limit = bound.groups()
        return f"expected {_PLAIN_TYPES[kind]} {_BOUND_WORDS[sign]} {limit}"
    if form := form_in_words(problem):
        return form
    match = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", problem)
    if match is None:
        return problem
    expected, got = (
        " or ".join(_PLAIN_TYPES.get(part.strip(), part.strip()) for part in group.split("|"))
        for group in match.groups()
    )
    return f"expected {expected}, got {got}"


def _given(value: Any, path: SettingPath) -> str:
    """Quote a short number that was refused; text and long numbers may be secrets."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return ""
    text = repr(value)
    return f" ({text})" if isinstance(value, (int, float)) and len(text) <= 20 else ""
