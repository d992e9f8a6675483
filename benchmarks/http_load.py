"""A closed-loop HTTP client that costs little: raw protocols, bodies composed beforehand.

It counts answers, server-sent events and latencies, and knows nothing of what they say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from sim.traces.percentiles import percentile

_OK = b"HTTP/1.1 200"
_EVENT = b"data: "
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Load:
    """What came of a phase: seconds per answer, events, answers other than 200, seconds in all."""

    latencies_s: list[float] = field(default_factory=list)
    num_events: int = 0
    num_bad: int = 0
    duration_s: float = 0.0
    first_bad: bytes = b""

    @property
    def num_answers(self) -> int:
        """Answers with status 200."""
        return len(self.latencies_s)

    def percentile_us(self, share: float) -> float:
        """Return a percentile of the latency in microseconds."""
        return percentile(sorted(self.latencies_s), share) * 1e6


class _Client(asyncio.Protocol):
    """One keep-alive connection: the next request leaves when an answer is complete."""

    def __init__(self, next_request: Callable[[], bytes | None], load: Load) -> None:
        self._next = next_request
        self._load = load
        self._buffer = bytearray()
        self._sent_at = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._buffer or self._sent_at:
            self._load.num_bad += 1
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        at = self._buffer[:head_end].lower().find(b"\r\ncontent-length:")
        if at >= 0:
            length = int(self._buffer[at + 17 : self._buffer.find(b"\r\n", at + 2)])
            if len(self._buffer) < head_end + 4 + length:
                return
        elif not self._buffer.endswith(_LAST_CHUNK):
            return
        self._take()

    def _take(self) -> None:
        load = self._load
        if self._buffer.startswith(_OK):
            load.latencies_s.append(time.perf_counter() - self._sent_at)
            load.num_events += self._buffer.count(_EVENT)
        else:
            load.num_bad += 1
            load.first_bad = load.first_bad or bytes(self._buffer[:300])
        self._buffer.clear()
        self._sent_at = 0.0
        self._send()

    def _send(self) -> None:
        request = self._next()
        if request is None:
            self._transport.close()
            return
        self._sent_at = time.perf_counter()
        self._transport.write(request)


def request_bytes(port: int, path: str, body: bytes, *, key: str | None = None) -> bytes:
    """Compose a POST."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def closed_loop(
    port: int, requests: Iterator[bytes], *, num_connections: int, seconds: float
) -> Load:
    """Keep `num_connections` busy for a while, or as long as there are requests.

    Returns once all answers have come.
    """
    load, started_at = Load(), time.perf_counter()

    def next_request() -> bytes | None:
        return next(requests, None) if time.perf_counter() - started_at < seconds else None

    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(num_connections):
        _, client = await loop.create_connection(
            lambda: _Client(next_request, load), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.gather(*(client.closed for client in clients))
    load.duration_s = time.perf_counter() - started_at
    return load
