"""Carries the stream of one replica to where the answer is built, under the time limits.

It takes upstream bytes apart and says what they are; whether a failure is tried again, and what
the client is told of it, is dispatch's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from engine.frontend.sse import DONE_DATA, SseEvent, SseParser
from kvindex.foundation.errors import WireError
from router.fleet.client import FailureCause, ReplicaFailure, Upstream
from router.request.body import Endpoint
from router.request.chunks import Chunk, presentable, read_chunk
from router.request.client_stream import ClientStream
from router.request.collect import ChunkFold

_ENGINE_DEAD = "engine_dead"
_MOVE_EVERY_S = 0.05


class Sink(Protocol):
    """Where the chunks of one answer go, whichever replicas they come from."""

    def accept(self, data: bytes, chunk: Chunk) -> None:
        """Take one chunk, in order."""
        ...

    async def flush(self) -> None:
        """Pass on what may be passed on of the chunks taken so far."""
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
        self._has_output = False

    def accept(self, data: bytes, chunk: Chunk) -> None:
        shown = presentable(data, chunk, include_usage=self._include_usage)
        if shown is not None:
            self._held.append(shown)
        self._has_output = self._has_output or chunk.has_output

    async def flush(self) -> None:
        if self._held and (self._stream.num_events or self._has_output):
            await self._send_held()

    async def done(self) -> None:
        if self._held:
            await self._send_held()
        await self._stream.done()

    def restart(self) -> bool:
        self._held.clear()
        self._has_output = False
        return self._stream.num_events == 0

    async def _send_held(self) -> None:
        held, self._held = self._held, []
        await self._stream.send(held)


class FoldSink:
    """Keeps chunks for an answer that is sent as a whole; `answer` is there after `done`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._fold = ChunkFold(endpoint)
        self.answer = b""

    def accept(self, data: bytes, chunk: Chunk) -> None:
        self._fold.add(data)

    async def flush(self) -> None:
        return

    async def done(self) -> None:
        self.answer = msgspec.json.encode(self._fold.result())

    def restart(self) -> bool:
        self._fold = ChunkFold(self._endpoint)
        return True


class Relay:
    """One attempt's relay.

    `on_output` is called at the first output, `on_chunk` for each chunk that the sink has taken.

    `limit` is the caller's running time-out; the relay moves it on as chunks come, and lifts it
    while a client is waited for that could be slower than what is left of it.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        replica: str,
        limit: asyncio.Timeout,
        stall_s: float,
        slow_client_s: float,
        on_output: Callable[[], None],
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        self._sink = sink
        self._replica = replica
        self._limit = limit
        self._stall_s = stall_s
        self._slow_client_s = slow_client_s
        self._on_output = on_output
        self._on_chunk = on_chunk
        self.has_output = False

    async def run(self, upstream: Upstream) -> None:
        """Relay up to the end marker; raise ReplicaFailure for any other end."""
        parser = SseParser()
        async for data in upstream.chunks():
            try:
                is_done = await self._take(parser.feed(data))
            except WireError as error:
                raise ReplicaFailure("lost", f"{self._replica}: {error}") from None
            if is_done:
                await upstream.drain()
                return
        raise ReplicaFailure("lost", f"{self._replica} ended its stream without [DONE]")

    async def _take(self, events: Sequence[SseEvent]) -> bool:
        """Handle what came in one read, passed on in one write; True at the end marker.

        What came before something that is wrong has been taken, and is passed on. WireError for
        what the sink cannot read.
        """
        if not any(event.comment is None for event in events):
            return False
        try:
            is_done = self._accept(events)
        finally:
            await self._pass_on()
        if is_done:
            self._limit.reschedule(None)
            await self._sink.done()
        return is_done

    async def _pass_on(self) -> None:
        """Let the client have what was taken; its slowness is not the replica's.

        Timers cost more than all else here, so the limit stays where it is while even the slowest
        client, which is given up after `slow_client_s`, could not run into it.
        """
        loop, limit_at = asyncio.get_running_loop(), self._limit.when()
        if self.has_output and limit_at is not None:
            left_s = limit_at - loop.time()
            if left_s > self._slow_client_s:
                await self._sink.flush()
                if left_s < self._stall_s - _MOVE_EVERY_S:
                    self._limit.reschedule(loop.time() + self._stall_s)
                return
        self._limit.reschedule(None)
        await self._sink.flush()
        self._limit.reschedule(loop.time() + self._stall_s if self.has_output else limit_at)

    def _accept(self, events: Sequence[SseEvent]) -> bool:
        """Hand chunks to the sink; True at the end marker."""
        for event in events:
            if event.comment is not None:
                continue
            if event.data == DONE_DATA:
                return True
            chunk = self._read(event)
            self._sink.accept(event.data, chunk)
            self._on_chunk(chunk)
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
        if not self.has_output and chunk.has_output:
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
