"""Carries the stream of one replica to where the answer is built, under the time limits.

It takes upstream bytes apart and says what they are; whether a failure is tried again, and what
the client is told of it, is dispatch's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from engine.frontend.sse import DONE_DATA, SseEvent, SseParser
from kvindex.foundation.errors import WireError
from router.fleet.client import FailureCause, ReplicaFailure, Upstream
from router.request.body import Endpoint
from router.request.chunks import Chunk, presentable, read_chunk, read_chunks
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
        """Take the end marker; what was not passed on yet goes with it."""
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
        if self._held and (self._has_output or self._stream.num_events):
            held, self._held = self._held, []
            await self._stream.send(held)

    async def done(self) -> None:
        held, self._held = self._held, []
        await self._stream.done(held)

    def restart(self) -> bool:
        self._held.clear()
        self._has_output = False
        return self._stream.num_events == 0


class FoldSink:
    """Keeps chunks for an answer that is sent as a whole; `answer` is there after `done`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._fold = ChunkFold(endpoint)
        self._held: list[bytes] = []
        self.answer = b""

    def accept(self, data: bytes, chunk: Chunk) -> None:
        self._held.append(data)

    async def flush(self) -> None:
        held, self._held = self._held, []
        self._fold.add(held)

    async def done(self) -> None:
        await self.flush()
        self.answer = msgspec.json.encode(self._fold.result())

    def restart(self) -> bool:
        self._fold = ChunkFold(self._endpoint)
        self._held.clear()
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
        try:
            while data := await upstream.next_piece():
                if await self._take(parser.feed(data)):
                    await upstream.drain()
                    return
        except WireError as error:
            raise ReplicaFailure("lost", f"{self._replica}: {error}") from None
        raise ReplicaFailure("lost", f"{self._replica} ended its stream without [DONE]")

    async def _take(self, events: Sequence[SseEvent]) -> bool:
        """Handle what came in one read, passed on in one write; True at the end marker.

        What came before something that is wrong has been taken, and is passed on. WireError for
        what the sink cannot read.
        """
        chunks = [event.data for event in events if event.comment is None]
        if not chunks:
            return False
        try:
            is_done = self._accept(chunks)
        except (ReplicaFailure, WireError):
            await self._pass_on()
            raise
        if is_done:
            self._limit.reschedule(None)
            await self._sink.done()
        else:
            await self._pass_on()
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

    def _accept(self, chunks: Sequence[bytes]) -> bool:
        """Hand chunks to the sink; True at the end marker."""
        is_done = DONE_DATA in chunks
        if is_done:
            chunks = chunks[: chunks.index(DONE_DATA)]
        for data, chunk in zip(chunks, self._read(chunks), strict=True):
            if chunk.error is not UNSET and bytes(chunk.error) != b"null":
                raise self._gave_up(chunk.error)
            if not self.has_output and chunk.has_output:
                self.has_output = True
                self._on_output()
            self._sink.accept(data, chunk)
            self._on_chunk(chunk)
        return is_done

    def _read(self, chunks: Sequence[bytes]) -> Iterable[Chunk]:
        """Read chunks, all at once if they are what they should be."""
        if len(chunks) > 1:
            try:
                return read_chunks(chunks)
            except msgspec.DecodeError:
                pass  # The one that is wrong says so when those before it have been taken.
        return map(self._read_one, chunks)

    def _read_one(self, data: bytes) -> Chunk:
        try:
            return read_chunk(data)
        except msgspec.DecodeError as error:
            raise ReplicaFailure("lost", f"{self._replica} sent no chunk: {error}") from None

    def _gave_up(self, error: msgspec.Raw) -> ReplicaFailure:
        said = _read_error(error)
        cause: FailureCause = "lost" if said.code == _ENGINE_DEAD else "gave_up"
        return ReplicaFailure(cause, f"{self._replica} gave up: {said.message}")


class _ErrorObject(msgspec.Struct, frozen=True):
    message: str = "unknown error"
    code: str | int | None = None


def _read_error(raw: msgspec.Raw) -> _ErrorObject:
    """Read an OpenAI error object; some engines send a bare string."""
    try:
        return msgspec.json.decode(raw, type=_ErrorObject)
    except msgspec.DecodeError:
        return _ErrorObject(bytes(raw)[:200].decode("utf-8", "replace"))
