"""The message that the deltas of one chat choice add up to.

A replica sums its own deltas and a gateway those of its replicas, so both answer alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from engine.frontend.openai import AssistantMessage, CalledFunction, ChatDelta, ToolCall


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> ToolCall:
        function = CalledFunction(name=self.name, arguments="".join(self.arguments))
        return ToolCall(id=self.id, function=function)


class MessageSum:
    """Deltas in, in order; the message as far as it is there."""

    __slots__ = ("_calls", "_content", "_reasoning")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    @property
    def reasoning(self) -> str:
        """What was thought."""
        return "".join(self._reasoning)

    def add(self, delta: ChatDelta) -> None:
        """Take one delta; ValueError when a part of a call belongs to none."""
        if delta.content is not UNSET:
            self._content.append(delta.content)
        if delta.reasoning_content is not UNSET:
            self._reasoning.append(delta.reasoning_content)
        for part in delta.tool_calls or ():
            if part.index == len(self._calls) and part.id and part.function.name:
                self._calls.append(_Call(part.id, part.function.name))
            if not 0 <= part.index < len(self._calls):
                raise ValueError(f"a part of tool call {part.index}, which has not begun")
            self._calls[part.index].arguments.append(part.function.arguments)

    def message(self) -> AssistantMessage:
        """Return the message; one that only thinks or calls has no content."""
        content, reasoning = "".join(self._content), self.reasoning
        return AssistantMessage(
            content=None if not content and (self._calls or reasoning) else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=[call.whole() for call in self._calls] or UNSET,
        )
