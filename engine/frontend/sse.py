"""Server-sent events: how we write a stream, and how a relay reads one from any chunking.

It follows the event-stream format of the HTML standard; `id` and `retry` are ignored. It knows
no sockets and not what the data mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine.frontend.errors import envelope
from kvindex.foundation.errors import PrefixFleetError, WireError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
DONE_DATA = b"[DONE]"
MAX_EVENT_BYTES = 4 * 1024 * 1024

_encoder = msgspec.json.Encoder()
_BEGIN, _END = b"data: ", b"\n\n"
_BETWEEN = _END + _BEGIN


def encode_event(payload: Any) -> bytes:
    """Encode one data event; JSON never holds a raw line break, so one line is enough."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def encode_error(error: PrefixFleetError) -> bytes:
    """Encode the event that ends a stream which cannot go on; no [DONE] follows it."""
    return encode_event(envelope(error))


class EventShape(Protocol):
    """How an endpoint shows the chunks of a chat stream; each call returns encoded events."""

    def take(self, data: bytes) -> bytes:
        """Show one chunk, given as JSON."""
        ...

    def take_all(self, chunks: Sequence[bytes]) -> bytes:
        """Show chunks that came together, at least one."""
        ...

    def end(self) -> bytes:
        """Show that the stream is complete."""
        ...

    def fail(self, error: PrefixFleetError) -> bytes:
        """Show that the stream cannot go on; nothing follows."""
        ...


class PlainEvents:
    """Chunks as they are, then [DONE]: chat completions and completions."""

    def take(self, data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"

    def take_all(self, chunks: Sequence[bytes]) -> bytes:
        return b"data: " + _BETWEEN.join(chunks) + b"\n\n"

    def end(self) -> bytes:
        return DONE

    def fail(self, error: PrefixFleetError) -> bytes:
        return encode_error(error)


class SseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event, or one comment line (then `comment` is set and there are no data)."""

    data: bytes = b""
    event: str | None = None
    comment: bytes | None = None

    @property
    def is_done(self) -> bool:
        """Tell whether this is OpenAI's end marker."""
        return self.comment is None and self.data == DONE_DATA


class SseParser:
    """An incremental parser: feed bytes as they come, get the events they complete.

    An event (or comment) of more than `max_event_bytes` raises WireError, so memory is bounded.
    What is fed after that, or an unfinished event at the end, is never returned.
    """

    __slots__ = (
        "_buffer",
        "_data",
        "_event",
        "_event_bytes",
        "_max_event_bytes",
        "_skip_line_feed",
    )

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()
        self._data: list[bytes] = []
        self._event: str | None = None
        self._event_bytes = 0
        self._skip_line_feed = False

    @property
    def has_partial_event(self) -> bool:
        """Tell whether the stream stands in the middle of an event."""
        return bool(self._buffer or self._data)

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take the next bytes and return what is complete, in order; O(len(chunk))."""
        whole = self.whole_data(chunk)
        return self._feed(chunk) if whole is None else [SseEvent(data=one) for one in whole]

    def feed_data(self, chunk: bytes) -> list[bytes]:
        """Do the same, and return only the data of the events, without comments."""
        whole = self.whole_data(chunk)
        if whole is not None:
            return whole
        return [event.data for event in self._feed(chunk) if event.comment is None]

    def _feed(self, chunk: bytes) -> list[SseEvent]:
        if self._skip_line_feed and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_line_feed = False
        if b"\r" in chunk:
            self._skip_line_feed = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events: list[SseEvent] = []
        for line in lines:
            if self._buffer:
                self._buffer += line
                line = bytes(self._buffer)
                self._buffer.clear()
            self._check_size(line)
            event = self._take_line(line)
            if event is not None:
                events.append(event)
        self._buffer += rest
        self._check_size(self._buffer)
        return events

    def whole_data(self, chunk: bytes) -> list[bytes] | None:
        """Return the data of the next bytes where they are events of one line each, as most are.

        None where they are anything else: then nothing was taken, and `feed` them.
        """
        if (
            not (chunk.startswith(_BEGIN) and chunk.endswith(_END))
            or self._buffer
            or self._event_bytes
            or self._skip_line_feed
            or b"\r" in chunk
            or len(chunk) > self._max_event_bytes
        ):
            return None
        data = chunk[len(_BEGIN) : -len(_END)].split(_BETWEEN)
        return data if chunk.count(b"\n") == len(_END) * len(data) else None

    def _take_line(self, line: bytes) -> SseEvent | None:
        self._event_bytes += len(line) + 1
        if not line:
            return self._dispatch()
        if line.startswith(b":"):
            self._event_bytes -= len(line) + 1
            return SseEvent(comment=line[1:].removeprefix(b" "))
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._event = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event
        self._data, self._event, self._event_bytes = [], None, 0
        return SseEvent(data=b"\n".join(data), event=event) if data else None

    def _check_size(self, line: bytes | bytearray) -> None:
        if self._event_bytes + len(line) > self._max_event_bytes:
            raise WireError(f"event stream: an event exceeds {self._max_event_bytes} bytes")
