"""Carries the stream of one replica to where the answer is built, under the time limits.

It takes upstream bytes apart and says what they are; whether a failure is tried again, and what
the client is told of it, is dispatch's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.frontend.sse import SseEvent, SseParser
from kvindex.foundation.errors import WireError
from router.fleet.client import FailureCause, ReplicaFailure, Upstream
from router.request.body import Endpoint
from router.request.chunks import Chunk, presentable, read_chunk
from router.request.client_stream import ClientStream
from router.request.collect import ChunkFold

_ENGINE_DEAD = "engine_dead"


class Sink(Protocol):
    """Where the chunks of one answer go, whichever replicas they come from."""

    async def accept(self, data: bytes, chunk: Chunk) -> None:
        """Take one chunk, in order."""
        ...

    async def done(self) -> None:
        """Take the end marker."""
        ...

    def restart(self) -> bool:
        """Forget what was taken; False when the client has seen some of it."""
        ...


class StreamSink:
    """Sends chunks on to a streaming client.

    Chunks before the first output are held back, so that an attempt which dies before it leaves
    no trace and another can take its place.
    """

    def __init__(self, stream: ClientStream, *, include_usage: bool) -> None:
        self._stream = stream
        self._include_usage = include_usage
        self._held: list[bytes] = []

    async def accept(self, data: bytes, chunk: Chunk) -> None:
        shown = presentable(data, chunk, include_usage=self._include_usage)
        if shown is not None:
            self._held.append(shown)
        if self._stream.num_events or chunk.has_output:
            await self._flush()

    async def done(self) -> None:
        await self._flush()
        await self._stream.done()

    def restart(self) -> bool:
        self._held.clear()
        return self._stream.num_events == 0

    async def _flush(self) -> None:
        held, self._held = self._held, []
        for data in held:
            await self._stream.send(data)


class FoldSink:
    """Keeps chunks for an answer that is sent as a whole; `answer` is there after `done`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._fold = ChunkFold(endpoint)
        self.answer = b""

    async def accept(self, data: bytes, chunk: Chunk) -> None:
        self._fold.add(data)

    async def done(self) -> None:
        self.answer = msgspec.json.encode(self._fold.result())

    def restart(self) -> bool:
        self._fold = ChunkFold(self._endpoint)
        return True


class Relay:
    """One attempt's relay.

    `on_output` is called at the first output, `on_chunk` for each chunk that the sink has taken.

    `limit` is the caller's running time-out; the relay moves it on with every chunk, and lifts it
    while a slow client is waited for.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        replica: str,
        limit: asyncio.Timeout,
        stall_s: float,
        on_output: Callable[[], None],
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        self._sink = sink
        self._replica = replica
        self._limit = limit
        self._stall_s = stall_s
        self._on_output = on_output
        self._on_chunk = on_chunk
        self.has_output = False

    async def run(self, upstream: Upstream) -> None:
        """Relay up to the end marker; raise ReplicaFailure for any other end."""
        parser = SseParser()
        async for data in upstream.chunks():
            try:
                events = parser.feed(data)
            except WireError as error:
                raise ReplicaFailure("lost", f"{self._replica}: {error}") from None
            for event in events:
                if event.comment is None and await self._take(event):
                    await upstream.drain()
                    return
        raise ReplicaFailure("lost", f"{self._replica} ended its stream without [DONE]")

    async def _take(self, event: SseEvent) -> bool:
        """Handle one data event; True when it was the end marker."""
        chunk = None if event.is_done else self._read(event)
        limit_at = self._limit.when()
        self._limit.reschedule(None)
        try:
            if chunk is None:
                await self._sink.done()
                return True
            await self._sink.accept(event.data, chunk)
            self._on_chunk(chunk)
        except WireError as error:
            raise ReplicaFailure("lost", f"{self._replica}: {error}") from None
        stalled_at = asyncio.get_running_loop().time() + self._stall_s
        self._limit.reschedule(stalled_at if self.has_output else limit_at)
        return False

    def _read(self, event: SseEvent) -> Chunk:
        try:
            chunk = read_chunk(event.data)
        except msgspec.DecodeError as error:
            raise ReplicaFailure("lost", f"{self._replica} sent no chunk: {error}") from None
        if chunk.error is not None:
            said = _read_error(chunk.error)
            cause: FailureCause = "lost" if said.code == _ENGINE_DEAD else "gave_up"
            raise ReplicaFailure(cause, f"{self._replica} gave up: {said.message}")
        if chunk.has_output and not self.has_output:
            self.has_output = True
            self._on_output()
        return chunk


class _ErrorObject(msgspec.Struct, frozen=True):
    message: str = "unknown error"
    code: str | int | None = None


def _read_error(raw: msgspec.Raw) -> _ErrorObject:
    """Read an OpenAI error object; some engines send a bare string."""
    try:
        return msgspec.json.decode(raw, type=_ErrorObject)
    except msgspec.DecodeError:
        return _ErrorObject(bytes(raw)[:200].decode("utf-8", "replace"))
