"""One HTTP/1.1 connection to a replica: a request out, its answer in, one after the other.

httptools takes answers apart, most of it without a call into Python: a general client costs more
than all that the gateway does with an answer. What has come of a body waits here until it is asked
for, up to a bound; beyond that the replica waits. It knows no replica and no time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_WAITING_BYTES = 256 * 1024


class _Events(NamedTuple):
    """What the parser calls; two of them are methods of a dict and a list."""

    on_header: Callable[[bytes, bytes], None]
    on_headers_complete: Callable[[], None]
    on_body: Callable[[bytes], None]
    on_message_complete: Callable[[], None]


class Connection(asyncio.Protocol):
    """A connection that serves requests in turn; `close` it, or use it again when `is_reusable`.

    Whatever breaks it raises ConnectionError where its answer is waited for, ConnectionResetError
    if the other side has closed it. `status` is 0 until the head of an answer has come, `headers`
    are those of the newest answer, in lower case.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fields: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        events = _Events(
            self._fields.__setitem__,
            self._on_headers_complete,
            self._pieces.append,
            self._on_message_complete,
        )
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(events)
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._broken: ConnectionError | None = None
        self._num_bytes = 0
        self._is_paused = False
        self._ends_with_connection = False
        self._keeps_alive = True
        self.is_complete = True
        self.status = 0
        self.headers: dict[bytes, bytes] = {}

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the last answer has come to its end, and stays."""
        return self.is_complete and self._keeps_alive and self._broken is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; uvloop's is no subclass of asyncio.Transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection for that of the answer where nothing else tells it."""
        if exc is None and self.status and self._ends_with_connection:
            self.is_complete, self._keeps_alive = True, False
        self._fail(ConnectionResetError(str(exc or "it closed the connection")))

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and wake who waits for it."""
        parser = self._parser
        if parser is None:
            return
        self._num_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"its answer is not HTTP: {error}"))
            return
        if not self.status and self._num_bytes > MAX_HEAD_BYTES:
            self._fail(ConnectionError(f"its headers exceed {MAX_HEAD_BYTES} bytes"))
        elif self._num_bytes > MAX_WAITING_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if not self._was_taken():
            self._wake()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a request; the answer to the one before must have been read."""
        assert self.is_complete, "an answer is still to come"
        self._pieces.clear()
        self._take = None
        self._num_bytes, self.status, self.is_complete = 0, 0, False
        self._transport.writelines(frames)

    async def head(self) -> int:
        """Wait for the head of the answer and return its status."""
        while not self.status:
            await self._more()
        return self.status

    async def next_piece(self) -> bytes:
        """Wait for more of the body and return all that has come, b"" at its end."""
        pieces = self._pieces
        while not pieces and not self.is_complete:
            await self._more()
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._forget_pieces()
        return data

    def offer(self, take: Callable[[bytes], bool]) -> None:
        """Offer pieces of the body to `take` first, while `next_piece` is waiting for one.

        It must not raise; for what it does not take, and returns False, `next_piece` returns.
        """
        self._take = take

    def close(self) -> None:
        """Close at once, whatever is under way: that is how a replica learns to stop."""
        self._fail(ConnectionError("closed by this gateway"))

    async def _more(self) -> None:
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        self._waiter = self._loop.create_future()
        await self._waiter

    def _was_taken(self) -> bool:
        """Offer what has come of a body that goes on; True when nothing of it is left."""
        pieces, waiter = self._pieces, self._waiter
        if self._take is None or not pieces or self.is_complete:
            return False
        if waiter is None or waiter.done():
            return False
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not self._take(data):
            return False
        self._forget_pieces()
        return True

    def _forget_pieces(self) -> None:
        """Let the replica go on: what has come is somebody else's now."""
        self._pieces.clear()
        self._num_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: ConnectionError) -> None:
        """Make no more of the connection; what has come of a body can still be read."""
        if self._broken is None:
            self._broken = error
            self._parser = None  # It refers to us, as we to it.
            self._transport.abort()
            self._wake()

    def _on_headers_complete(self) -> None:
        assert self._parser is not None
        if self.is_complete:
            raise httptools.HttpParserError("nothing was asked")
        status = self._parser.get_status_code()
        self.headers = {name.lower(): value for name, value in self._fields.items()}
        self._fields.clear()
        if status >= 200:  # Those below announce another one.
            self.status = status
            self._ends_with_connection = (
                b"content-length" not in self.headers and b"transfer-encoding" not in self.headers
            )

    def _on_message_complete(self) -> None:
        assert self._parser is not None
        if self.status:
            self.is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()
            self._fields.clear()  # trailers
