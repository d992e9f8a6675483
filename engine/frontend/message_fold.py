"""The fold of one chat choice's text into a message: what was thought, said and called.

Pure, and over text alone: the deltas add up to the message however the text was cut, and one that
was begun elsewhere is taken up by pushing its text again. It knows no tokens and no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from engine.frontend.call_object import CallArguments, CallStart
from engine.frontend.message_sum import MessageSum
from engine.frontend.openai import (
    AssistantMessage,
    CalledFunctionDelta,
    ChatDelta,
    ToolCallDelta,
)
from engine.frontend.reasoning import ReasoningSplit
from engine.frontend.tool_calls import ToolEvent, ToolParser


class CallIds(msgspec.Struct, frozen=True):
    """Names the calls of one choice, the same wherever it is folded.

    `num_chars` None is OpenAI's form, else so many letters and digits.
    """

    request_id: str
    choice: int
    num_chars: int | None = None

    def of(self, index: int) -> str:
        """Return the id of a call."""
        source = f"{self.request_id}/{self.choice}/{index}".encode()
        digest = hashlib.blake2b(source, digest_size=12).hexdigest()
        return f"call_{digest}" if self.num_chars is None else digest[: self.num_chars]


class MessageFold:
    """One choice's message so far. Without parsers, all text is content.

    `only_one_call`: further calls are left out.
    """

    __slots__ = ("_ids", "_num_calls", "_only_one_call", "_split", "_sum", "_tools")

    def __init__(
        self,
        ids: CallIds,
        *,
        split: ReasoningSplit | None = None,
        tools: ToolParser | None = None,
        only_one_call: bool = False,
    ) -> None:
        self._ids = ids
        self._split = split
        self._tools = tools
        self._only_one_call = only_one_call
        self._num_calls = 0
        self._sum = MessageSum()

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return self._sum.reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return self._num_calls > 0

    def push(self, text: str, *, is_last: bool) -> ChatDelta:
        """Take text; return what it adds to the message. `is_last`: nothing follows."""
        reasoning, answer = ("", text) if self._split is None else self._split.push(text)
        events: list[ToolEvent] = self._parse(answer)
        if is_last and self._split is not None:
            more_reasoning, answer = self._split.finish()
            reasoning += more_reasoning
            events += self._parse(answer)
        if is_last and self._tools is not None:
            events += self._tools.finish()
        delta = ChatDelta(
            content="".join(event for event in events if isinstance(event, str)) or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=self._call_deltas(events) or UNSET,
        )
        self._sum.add(delta)
        return delta

    def message(self) -> AssistantMessage:
        """Return the message as far as it is there."""
        return self._sum.message()

    def _parse(self, text: str) -> list[ToolEvent]:
        if self._tools is None:
            return [text] if text else []
        return self._tools.push(text) if text else []

    def _call_deltas(self, events: Iterable[ToolEvent]) -> list[ToolCallDelta]:
        """Return what is new of calls, one delta for each call concerned."""
        deltas: dict[int, ToolCallDelta] = {}
        for event in events:
            if isinstance(event, CallStart):
                index = self._num_calls
                self._num_calls += 1
                function = CalledFunctionDelta(name=event.name)
                deltas[index] = ToolCallDelta(
                    index=index, id=self._ids.of(index), type="function", function=function
                )
            elif isinstance(event, CallArguments):
                index = self._num_calls - 1
                delta = deltas.get(index) or ToolCallDelta(
                    index=index, function=CalledFunctionDelta()
                )
                arguments = delta.function.arguments + event.text
                function = msgspec.structs.replace(delta.function, arguments=arguments)
                deltas[index] = msgspec.structs.replace(delta, function=function)
        if self._only_one_call:
            return [delta for index, delta in deltas.items() if index == 0]
        return list(deltas.values())
