"""A chat completion as OpenAI's Responses show it: one object, or a stream of typed events.

A fold over the chunks of a chat stream. It reads the few fields that it shows, so chunks of any
engine will do, and knows neither HTTP nor where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.frontend.errors import envelope
from engine.frontend.responses_request import ResponsesRequest
from kvindex.foundation.errors import PrefixFleetError, WireError

Json = dict[str, Any]


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True):
    index: int | None = None  # none in a whole answer, where calls stand in order
    id: str | None = None
    function: _Function = _Function()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[Json] | None = None


class _Choice(msgspec.Struct, frozen=True):
    """The choice of a chunk (`delta`) or of a whole answer (`message`)."""

    delta: _Delta = _Delta()
    message: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Chat(msgspec.Struct, frozen=True):
    """A chunk, or a whole answer."""

    id: str
    created: int
    model: str
    choices: list[_Choice] = []
    usage: _Usage | None = None


@dataclass(slots=True)
class _Item:
    """One output item that grows: a message, what was thought, or a call."""

    kind: str
    id: str
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    status: str = "in_progress"
    logprobs: list[Json] = field(default_factory=list)

    def shown(self) -> Json:
        """Return the item as far as it is there; a growing one has no content yet."""
        status = self.status
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"type": self.kind, "id": self.id, "status": status, **call}
        content = [self.part()] if status != "in_progress" else []
        if self.kind == "reasoning":
            shown = {"id": self.id, "status": status, "summary": [], "content": content}
            return {"type": self.kind, **shown}
        shown = {"id": self.id, "status": status, "role": "assistant", "content": content}
        return {"type": self.kind, **shown}

    def part(self) -> Json:
        """Return its one content part."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        shown = {"type": "output_text", "text": self.text, "annotations": []}
        return {**shown, "logprobs": self.logprobs}


_decoder = msgspec.json.Decoder(_Chat)
_encoder = msgspec.json.Encoder()


class ResponseStream:
    """Chunks of one chat stream in, in order; events out, encoded and numbered.

    An `EventShape`. What is no chunk raises WireError.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._num_events = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._first: _Chat | None = None
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None

    def take(self, data: bytes) -> bytes:
        """Return the events that one chunk causes."""
        try:
            chunk = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise WireError(f"chat chunk: {error}") from None
        events = b"" if self._first is not None else self._begin(chunk)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            events += self._take_delta(choice.message or choice.delta, choice.logprobs)
            self._finish_reason = choice.finish_reason or self._finish_reason
        return events

    def take_all(self, chunks: Sequence[bytes]) -> bytes:
        """Return the events that chunks which came together cause."""
        return b"".join(map(self.take, chunks))

    def end(self) -> bytes:
        """Return the events that end the stream."""
        events = self._close_open()
        status = self._end_status
        return events + self._event(f"response.{status}", response=self._response(status))

    def result(self) -> bytes:
        """Return the response object instead, when nobody follows the events."""
        self._close_open()
        return _encoder.encode(self._response(self._end_status))

    def fail(self, error: PrefixFleetError) -> bytes:
        """Return the events of a stream that cannot go on."""
        shown = envelope(error).error
        told = {"code": shown.code or shown.type, "message": shown.message}
        events = self._event("error", **told, param=shown.param)
        if self._first is None:
            return events
        return events + self._event("response.failed", response=self._response("failed", told))

    @property
    def _end_status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _begin(self, chunk: _Chat) -> bytes:
        self._first = chunk
        events = self._event("response.created", response=self._response("in_progress"))
        return events + self._event("response.in_progress", response=self._response("in_progress"))

    def _take_delta(self, delta: _Delta, logprobs: _Logprobs | None) -> bytes:
        events = b""
        if delta.reasoning_content:
            events += self._extend("reasoning", delta.reasoning_content, [])
        # Tokens whose text is held back, half characters say, come with their logprobs alone.
        shown = _shown_logprobs(logprobs) if self._request.wants_logprobs else []
        if delta.content or shown:
            events += self._extend("message", delta.content or "", shown)
        for i, call in enumerate(delta.tool_calls or ()):
            events += self._take_call(call, i if call.index is None else call.index)
        return events

    def _extend(self, kind: str, text: str, logprobs: list[Json]) -> bytes:
        item, events = self._item_of(kind)
        item.text += text
        item.logprobs += logprobs
        if kind == "reasoning":
            return events + self._item_event("response.reasoning_text.delta", item, delta=text)
        return events + self._item_event(
            "response.output_text.delta", item, delta=text, logprobs=logprobs
        )

    def _item_of(self, kind: str) -> tuple[_Item, bytes]:
        """Return the open item of a kind, and the events that open it."""
        item = self._open
        if item is not None and item.kind == kind:
            return item, b""
        events = self._close_open()
        prefix = "rs" if kind == "reasoning" else "msg"
        item = self._add(_Item(kind, self._id(prefix), len(self._items)))
        events += self._added(item)
        return item, events + self._item_event(
            "response.content_part.added", item, part=item.part()
        )

    def _take_call(self, call: _ToolCall, index: int) -> bytes:
        item, events = self._calls.get(index), b""
        if item is None:
            events = self._close_open()
            item = _Item("function_call", self._id("fc"), len(self._items))
            item.name, item.call_id = call.function.name or "", call.id or ""
            self._calls[index] = self._add(item)
            events += self._added(item)
        if not call.function.arguments:
            return events
        item.text += call.function.arguments
        return events + self._event(
            "response.function_call_arguments.delta",
            item_id=item.id,
            output_index=item.index,
            delta=call.function.arguments,
        )

    def _add(self, item: _Item) -> _Item:
        self._items.append(item)
        self._open = item
        return item

    def _added(self, item: _Item) -> bytes:
        return self._event("response.output_item.added", output_index=item.index, item=item.shown())

    def _close_open(self) -> bytes:
        """Return the events that end the item which was growing."""
        item, self._open = self._open, None
        if item is None:
            return b""
        events = self._done_text(item)
        item.status = self._end_status
        return events + self._event(
            "response.output_item.done", output_index=item.index, item=item.shown()
        )

    def _done_text(self, item: _Item) -> bytes:
        if item.kind == "function_call":
            return self._event(
                "response.function_call_arguments.done",
                item_id=item.id,
                output_index=item.index,
                name=item.name,
                arguments=item.text,
            )
        if item.kind == "reasoning":
            events = self._item_event("response.reasoning_text.done", item, text=item.text)
        else:
            events = self._item_event(
                "response.output_text.done", item, text=item.text, logprobs=item.logprobs
            )
        return events + self._item_event("response.content_part.done", item, part=item.part())

    def _id(self, prefix: str) -> str:
        assert self._first is not None, "the first chunk names the response"
        return f"{prefix}_{_bare_id(self._first.id)}_{len(self._items)}"

    def _response(self, status: str, error: Json | None = None) -> Json:
        assert self._first is not None, "the first chunk names the response"
        ended = status != "in_progress"
        return _response(
            self._request,
            self._first,
            status=status,
            output=[item.shown() for item in self._items] if ended else [],
            usage=self._usage if ended else None,
            error=error,
        )

    def _item_event(self, kind: str, item: _Item, **fields: object) -> bytes:
        return self._event(
            kind, item_id=item.id, output_index=item.index, content_index=0, **fields
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(payload) + b"\n\n"


def whole_response(request: ResponsesRequest, data: bytes) -> bytes:
    """Return a whole chat completion as a response; raise WireError if it is none."""
    stream = ResponseStream(request)
    stream.take(data)
    return stream.result()


def _response(
    request: ResponsesRequest,
    chat: _Chat,
    *,
    status: str,
    output: list[Json],
    usage: _Usage | None,
    error: Json | None,
) -> Json:
    """Return the response object; settings are shown as they took effect."""
    is_cut = status == "incomplete"
    return {
        "id": f"resp_{_bare_id(chat.id)}",
        "object": "response",
        "created_at": chat.created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": chat.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": request.text_format},
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else _shown_usage(usage),
        "user": request.user,
        "metadata": request.metadata,
    }


def _shown_usage(usage: _Usage) -> Json:
    """Return the usage in the names of responses; what was computed of a prompt is cached then."""
    details = usage.prompt_tokens_details
    num_cached = (details.cached_tokens if details else 0) or 0
    reasoning = usage.completion_tokens_details
    num_output = usage.completion_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": num_cached,
            "cache_write_tokens": usage.prompt_tokens - num_cached,
        },
        "output_tokens": num_output,
        "output_tokens_details": {
            "reasoning_tokens": (reasoning.reasoning_tokens if reasoning else 0) or 0
        },
        "total_tokens": usage.prompt_tokens + num_output,
    }


def _shown_logprobs(logprobs: _Logprobs | None) -> list[Json]:
    return list(logprobs.content or []) if logprobs is not None else []


def _bare_id(chat_id: str) -> str:
    return chat_id.removeprefix("chatcmpl-")
