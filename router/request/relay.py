"""Carries the stream of one replica to where the answer is built, under the time limits.

It takes upstream bytes apart and says what they are; whether a failure is tried again, and what
the client is told of it, is dispatch's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from engine.frontend.sse import DONE_DATA, SseParser
from kvindex.foundation.errors import WireError
from router.fleet.client import FailureCause, ReplicaFailure, Upstream
from router.request.chunks import Chunk, read_chunk, read_chunks
from router.request.sinks import Sink

_ENGINE_DEAD = "engine_dead"
_LEEWAY = 0.05
"""The share of its length by which a time limit may be off: moving it costs more than a token."""


class Relay:
    """One attempt's relay.

    `on_output` is called at the first output, `on_chunks` with all that the sink has taken since.

    Pieces of a stream that goes on are passed on where they arrive; the rest is for `run`.
    `limit` is the caller's running time-out; the relay moves it on as chunks come, and lifts it
    while the client is waited for. `num_pieces` counts what has come.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        replica: str,
        limit: asyncio.Timeout,
        stall_s: float,
        on_output: Callable[[], None],
        on_chunks: Callable[[Sequence[Chunk]], None],
    ) -> None:
        self._sink = sink
        self._replica = replica
        self._limit = limit
        self._stall_s = stall_s
        self._on_output = on_output
        self._on_chunks = on_chunks
        self._parser = SseParser()
        self._loop = asyncio.get_running_loop()
        self._move_at = 0.0
        self.has_output = False
        self.num_pieces = 0

    async def run(self, upstream: Upstream) -> None:
        """Relay up to the end marker; raise ReplicaFailure for any other end."""
        upstream.offer(self._take_at_once)
        try:
            while data := await upstream.next_piece():
                self.num_pieces += 1
                if await self._take(self._parser.feed_data(data)):
                    await upstream.drain()
                    return
        except WireError as error:
            raise ReplicaFailure("lost", f"{self._replica}: {error}") from None
        raise ReplicaFailure("lost", f"{self._replica} ended its stream without [DONE]")

    def _take_at_once(self, data: bytes) -> bool:
        """Pass a piece of a stream on, if nobody is waited for; False leaves it to `run`."""
        if not self.has_output:
            return False
        events = self._parser.whole_data(data)
        if events is None or DONE_DATA in events:
            return False
        chunks, failure = self._read(events)
        if failure is not None or not self._sink.pass_on(events, chunks):
            return False
        self.num_pieces += 1
        self._on_chunks(chunks)
        self._move_limit()
        return True

    async def _take(self, chunks: Sequence[bytes]) -> bool:
        """Handle what came in one read, passed on in one write; True at the end marker.

        What came before something that is wrong has been taken, and is passed on. WireError for
        what the sink cannot read.
        """
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
        """Let the client have what was taken; its slowness is not the replica's."""
        if not self._sink.flush_at_once():
            limit_at = self._limit.when()
            self._limit.reschedule(None)
            await self._sink.flush()
            self._limit.reschedule(limit_at)
            self._move_at = 0.0
        self._move_limit()

    def _move_limit(self) -> None:
        """Let a stream that has begun be silent for `stall_s` from now on."""
        now = self._loop.time()
        if self.has_output and now >= self._move_at:
            self._limit.reschedule(now + self._stall_s)
            self._move_at = now + _LEEWAY * self._stall_s

    def _accept(self, data: Sequence[bytes]) -> bool:
        """Hand chunks to the sink, up to whatever is wrong; True at the end marker."""
        is_done = DONE_DATA in data
        if is_done:
            data = data[: data.index(DONE_DATA)]
        chunks, failure = self._read(data)
        if not self.has_output and any(chunk.has_output for chunk in chunks):
            self.has_output = True
            self._on_output()
        self._sink.accept(data[: len(chunks)], chunks)
        self._on_chunks(chunks)
        if failure is not None:
            raise failure
        return is_done

    def _read(self, data: Sequence[bytes]) -> tuple[list[Chunk], ReplicaFailure | None]:
        """Read chunks, up to one that is none, or by which the replica gives up: then say so."""
        try:
            chunks = read_chunks(data)
        except msgspec.DecodeError:
            chunks, failure = self._read_readable(data)
        else:
            failure = None
        for i, chunk in enumerate(chunks):
            if chunk.error is not UNSET and bytes(chunk.error) != b"null":
                return chunks[:i], self._gave_up(chunk.error)
        return chunks, failure

    def _read_readable(self, data: Sequence[bytes]) -> tuple[list[Chunk], ReplicaFailure | None]:
        """Read chunks one by one, up to the one that is wrong."""
        chunks: list[Chunk] = []
        try:
            chunks.extend(map(read_chunk, data))
        except msgspec.DecodeError as error:
            return chunks, ReplicaFailure("lost", f"{self._replica} sent no chunk: {error}")
        return chunks, None

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
