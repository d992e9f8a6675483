"""Where the chunks of one answer go: on to a streaming client, or into one whole answer.

A sink knows chunks and its client; which replica they come from, and under which time limits, it
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.request.body import Endpoint
from router.request.chunks import Chunk, presentable
from router.request.client_stream import ClientStream
from router.request.collect import ChunkFold

_MAX_HELD = 256


class Sink(Protocol):
    """Where the chunks of one answer go, whichever replicas they come from."""

    def accept(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> None:
        """Take chunks that came together, in order: as they came, and as they read."""
        ...

    def pass_on(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> bool:
        """Take chunks and pass them on, if nobody is waited for; False, and nothing, otherwise."""
        ...

    def flush_at_once(self) -> bool:
        """Pass on what was taken and may be, in the same way."""
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

    def accept(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> None:
        self._held += self._shown(data, chunks)
        if not self._has_output:
            self._has_output = any(chunk.has_output for chunk in chunks)

    def pass_on(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> bool:
        if self._held or not self._has_output:
            return False
        shown = self._shown(data, chunks)
        return not shown or self._stream.send_at_once(shown)

    def _shown(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> list[bytes]:
        include_usage = self._include_usage
        shown = [
            presentable(one, chunk, include_usage=include_usage)
            for one, chunk in zip(data, chunks, strict=True)
        ]
        return [one for one in shown if one is not None]

    @property
    def _may_pass_on(self) -> bool:
        return bool(self._held) and (self._has_output or self._stream.num_events > 0)

    def flush_at_once(self) -> bool:
        if not self._may_pass_on:
            return True
        if not self._stream.send_at_once(self._held):
            return False
        self._held.clear()
        return True

    async def flush(self) -> None:
        if self._may_pass_on:
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
    """Keeps chunks for an answer that is sent as a whole; `answer` is there after `done`.

    They are read some hundreds at a time: a long answer at once would hold up all others.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._fold = ChunkFold(endpoint)
        self._held: list[bytes] = []
        self.answer = b""

    def accept(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> None:
        self._held += data

    def pass_on(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> bool:
        if len(self._held) >= _MAX_HELD:
            return False
        self._held += data
        return True

    def flush_at_once(self) -> bool:
        return len(self._held) < _MAX_HELD

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
