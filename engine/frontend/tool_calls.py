"""Calls in a model's output, told apart from its text: one parser per family of models.

Pure folds over text: what they give depends on all that was pushed, never on how it was cut. What
looks like a call and is none comes out as text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from engine.frontend.call_object import CallEvent, CallObject, NamedCall
from engine.frontend.reasoning import before_mark

ToolEvent = str | CallEvent
"""Text for the reader, or news of a call."""


class ToolParser(Protocol):
    """The output of one choice."""

    def push(self, text: str) -> list[ToolEvent]:
        """Take text; return what is certain of."""
        ...

    def finish(self) -> list[ToolEvent]:
        """Return what was held back, when no text follows."""
        ...


class HermesParser:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` in running text (Hermes, Qwen).

    White space around calls belongs to nobody.
    """

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._call: CallObject | None = None
        self._block = ""
        self._is_behind_call = False

    def push(self, text: str) -> list[ToolEvent]:
        self._held += text
        events: list[ToolEvent] = []
        while self._held:
            before = len(self._held)
            events += self._outside() if self._call is None else self._inside(self._call)
            if len(self._held) == before:
                break
        return events

    def finish(self) -> list[ToolEvent]:
        held, self._held = self._held, ""
        if self._call is not None:
            return [] if self._call.has_started else [self._block + held]
        if self._is_behind_call:
            held = held.strip()
        return [held] if held else []

    def _outside(self) -> list[ToolEvent]:
        shown, self._held, has_call = before_mark(self._held, self._BEGIN)
        if has_call:
            self._call, self._block = CallObject(), self._BEGIN
        if self._is_behind_call:
            shown = shown.lstrip()
        self._is_behind_call = self._is_behind_call and not shown
        return [shown] if shown else []

    def _inside(self, call: CallObject) -> list[ToolEvent]:
        if call.done:
            return self._close()
        taken = call.feed(self._held)
        self._block += self._held[:taken]
        self._held = self._held[taken:]
        events: list[ToolEvent] = list(call.events())
        self._is_behind_call = call.has_started
        if call.has_started:
            self._block = ""
        if call.failed:
            self._call = None
            if self._block:
                events.append(self._block)
        return events

    def _close(self) -> list[ToolEvent]:
        """Skip the mark behind a call; a model that forgets it is understood all the same."""
        held = self._held.lstrip()
        if held.startswith(self._END):
            self._held = held.removeprefix(self._END)
            self._call = None
        elif held and not self._END.startswith(held):
            self._call = None
        return []


class Llama3JsonParser:
    """`{"name": …, "parameters": …}` as the whole output, several with `;` between (Llama 3).

    An object is a call only if it names a function of the request; otherwise it is text.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._call: CallObject | None = None
        self._block = ""
        self._has_called = False
        self._is_text = False

    def push(self, text: str) -> list[ToolEvent]:
        self._held += text
        events: list[ToolEvent] = []
        while self._held and not self._is_text:
            before = (len(self._held), self._call)
            if self._call is None:
                self._between()
            else:
                events += self._inside(self._call)
            if (len(self._held), self._call) == before:
                break
        if self._is_text and self._held:
            events.append(self._held)
            self._held = ""
        return events

    def finish(self) -> list[ToolEvent]:
        held, self._held = self._block + self._held, ""
        if self._call is not None and self._call.has_started:
            return []
        return [held] if held and not (self._has_called and not held.strip("; \r\n\t")) else []

    def _between(self) -> None:
        """Find where the next object begins; anything else is text."""
        held = self._held.lstrip("; \r\n\t" if self._has_called else " \r\n\t")
        if not held or self._TAG.startswith(held):
            return
        held = held.removeprefix(self._TAG).lstrip()
        if not held:
            return
        if held.startswith("{"):
            self._block = self._held[: len(self._held) - len(held)]
            self._held = held
            self._call = CallObject()
        else:
            self._is_text = True

    def _inside(self, call: CallObject) -> list[ToolEvent]:
        taken = call.feed(self._held)
        self._block += self._held[:taken]
        self._held = self._held[taken:]
        if call.failed or (call.name is not None and call.name not in self._names):
            self._call, self._is_text = None, True
            if not call.has_started:
                self._held, self._block = self._block + self._held, ""
            return []
        events: list[ToolEvent] = list(call.events())
        if call.has_started:
            self._has_called, self._block = True, ""
        if call.done:
            self._call = None
        return events


class MistralParser:
    """`[TOOL_CALLS]` and a list of objects, or `name[ARGS]{…}` (Mistral's newer tokenizers)."""

    _BEGIN, _ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self) -> None:
        self._held = ""
        self._calls = False
        self._in_list = False
        self._call: CallObject | NamedCall | None = None
        self._has_called = False
        self._is_over = False
        self._raw = ""

    def push(self, text: str) -> list[ToolEvent]:
        self._held += text
        events: list[ToolEvent] = []
        while self._held:
            before = (len(self._held), self._call)
            events += self._step()
            if (len(self._held), self._call) == before:
                break
        return events

    def finish(self) -> list[ToolEvent]:
        held, self._held = self._held, ""
        if self._calls:
            return [] if self._has_called else [self._BEGIN + self._raw + held]
        return [held] if held else []

    def _step(self) -> list[ToolEvent]:
        if self._call is not None:
            return self._inside(self._call)
        return self._between() if self._calls else self._text()

    def _text(self) -> list[ToolEvent]:
        shown, self._held, self._calls = before_mark(self._held, self._BEGIN)
        return [shown] if shown else []

    def _between(self) -> list[ToolEvent]:
        """Skip what stands between calls up to the next one."""
        if self._is_over:
            self._held = "" if self._has_called else self._held
            return []
        held = self._held.lstrip(" \r\n\t,").removeprefix(self._BEGIN)
        if held.startswith("[") and not self._in_list and not self._BEGIN.startswith(held):
            self._in_list = True
            held = held[1:].lstrip()
        if held.startswith("]"):
            self._is_over = True
        elif held.startswith("{"):
            self._call = CallObject()
        elif not self._in_list and "{" in held:
            name = held.partition("{")[0]
            self._call = NamedCall(name.removesuffix(self._ARGS).strip())
            held = held.removeprefix(name)
        self._skip(len(self._held) - len(held))
        return []

    def _skip(self, num_chars: int) -> None:
        """Go on; what turns out to be no call is text after all."""
        if not self._has_called:
            self._raw += self._held[:num_chars]
        self._held = self._held[num_chars:]

    def _inside(self, call: CallObject | NamedCall) -> list[ToolEvent]:
        self._skip(call.feed(self._held))
        events: list[ToolEvent] = list(call.events())
        self._has_called = self._has_called or call.has_started
        if call.done:
            self._call = None
        elif call.failed:
            self._call = None
            self._is_over = True
        return events
