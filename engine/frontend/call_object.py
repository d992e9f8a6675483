"""Reads one JSON object that names a function and its arguments, while it is being written.

Arguments come out as the model wrote them. It checks only as much of the JSON as it must to know
where the parts end.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'[^"\\]+')
_IN_SCALAR = re.compile(r"[^\s,}\]]+")
_BETWEEN = re.compile(r'[^"{}\[\]]+')


class CallStart(msgspec.Struct, frozen=True):
    """A call has begun: this is the function's name."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call that has begun last."""

    text: str


CallEvent = CallStart | CallArguments


class JsonSpan:
    """Where one JSON value ends: fed text from its first character on, in runs."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_parts", "ended", "first")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._parts: list[str] = []
        self.first = ""
        self.ended = False

    @property
    def text(self) -> str:
        """The value as far as it was taken."""
        return "".join(self._parts)

    def take(self, text: str, start: int) -> int:
        """Take text from `start` on; return where the value ended, or the text."""
        at = start
        while at < len(text) and not self.ended:
            at = self._in_text(text, at) if self._in_string else self._outside_text(text, at)
        self._parts.append(text[start:at])
        return at

    def _in_text(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _run(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.ended = self._depth == 0
        return at + 1

    def _outside_text(self, text: str, at: int) -> int:
        self.first = self.first or text[at]
        if self.first not in '"{[':
            at = _run(_IN_SCALAR, text, at)
            self.ended = at < len(text)
            return at
        match text[at]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.ended = self._depth == 0
            case _:
                return _run(_BETWEEN, text, at)
        return at + 1


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


class NamedCall:
    """A call whose name stands before its arguments; fed these from their first character on."""

    __slots__ = ("_new", "_span", "done", "failed", "has_started", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self.failed = False
        self.has_started = False
        self._span = JsonSpan()
        self._new: list[str] = []

    def feed(self, text: str) -> int:
        """Take text; return how much of it belongs to the arguments."""
        end = self._span.take(text, 0)
        self._new.append(text[:end])
        self.done = self._span.ended
        return end

    def events(self) -> list[CallEvent]:
        """Return what is new of the call."""
        events: list[CallEvent] = [] if self.has_started else [CallStart(self.name)]
        self.has_started = True
        new, self._new = "".join(self._new), []
        return [*events, CallArguments(new)] if new else events


_Place = Literal["open", "key", "colon", "value", "next"]


class CallObject:
    """One object; fed text from its opening brace on, until it is `done` or has `failed`.

    A call starts once its name is known and its arguments begin, whichever comes first in the
    text. Arguments in a string of JSON come out unpacked; a call without any has "{}".
    """

    __slots__ = (
        "_has_arguments",
        "_key",
        "_new",
        "_place",
        "_span",
        "done",
        "failed",
        "has_started",
        "name",
    )

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.has_started = False
        self.name: str | None = None
        self._place: _Place = "open"
        self._key: str | None = None
        self._span: JsonSpan | None = None
        self._has_arguments = False
        self._new: list[str] = []

    def feed(self, text: str) -> int:
        """Take text; return how much of it belongs to the object."""
        at = 0
        while at < len(text) and not self.done:
            if self._span is not None:
                at = self._take_value(self._span, text, at)
            elif not self._take_mark(text[at]):
                at += 1
            if self.failed:
                return at
        return at

    def events(self) -> list[CallEvent]:
        """Return what is new of the call."""
        if self.name is None or not (self._has_arguments or self.done):
            return []
        events: list[CallEvent] = [] if self.has_started else [CallStart(self.name)]
        self.has_started = True
        if not self._has_arguments:
            self._has_arguments, self._new = True, ["{}"]
        new, self._new = "".join(self._new), []
        return [*events, CallArguments(new)] if new else events

    def _take_mark(self, char: str) -> bool:
        """Take a character between keys and values; True when it begins one of these instead."""
        if char in _SPACE:
            return False
        match self._place, char:
            case "open", "{":
                self._place = "key"
            case ("key", '"'):
                self._span = JsonSpan()
            case "colon", ":":
                self._place = "value"
            case "value", _ if char not in ",:}]":
                self._span = JsonSpan()
                self._has_arguments |= self._key in _ARGUMENT_KEYS and char != '"'
            case "next", ",":
                self._place = "key"
            case ("next", "}") | ("key", "}"):
                self.done = self.name is not None
                self.failed = not self.done
            case _:
                self.failed = True
        return self._span is not None or self.failed

    def _take_value(self, span: JsonSpan, text: str, start: int) -> int:
        """Take more of a key or value; return where it stopped."""
        at = span.take(text, start)
        if self._place == "value" and self._key in _ARGUMENT_KEYS and span.first != '"':
            self._new.append(text[start:at])
        if span.ended:
            self._span = None
            self._end_value(span)
        return at

    def _end_value(self, span: JsonSpan) -> None:
        is_argument = self._key in _ARGUMENT_KEYS
        if self._place == "value" and (
            (is_argument and span.first != '"') or not (is_argument or self._key == "name")
        ):
            self._place = "next"
            return
        try:
            value = json.loads(span.text)
        except ValueError:
            self.failed = True
            return
        if self._place == "key":
            self._key, self._place = value, "colon"
            return
        self._place = "next"
        if self._key == "name":
            self.name = value if isinstance(value, str) else None
            self.failed = self.name is None
        else:
            self._has_arguments, self._new = True, [value]
