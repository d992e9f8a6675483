"""The event stream towards one client: started at most once, alive during silence.

It knows nothing of replicas; whoever writes to it decides what and in which order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType

from aiohttp import web

from engine.frontend.sse import KEEP_ALIVE, EventShape, PlainEvents
from kvindex.foundation.errors import PrefixFleetError

_AT_ONCE_BYTES = 16 * 1024
"""Far below what a transport, or aiohttp, buffers before it makes a writer wait."""


class ClientStream:
    """Use as a context: inside it, a comment goes out after every `keep_alive_s` of silence.

    The status line leaves with the first byte of either kind; until then `started` is False and
    an error can still be a plain answer. `headers` may be changed until then. `shape`: how chunks
    are shown, None as they are.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        keep_alive_s: float,
        write_timeout_s: float,
        shape: EventShape | None = None,
    ) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._shape = shape or PlainEvents()
        self._is_plain = shape is None
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None  # once it takes pieces of the body
        self._write_lock = asyncio.Lock()
        self._num_writers = 0  # that have the lock, or wait for it
        self._timer: asyncio.TimerHandle | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._written_at = 0.0
        self.headers: dict[str, str] = {}
        self.num_events = 0

    @property
    def started(self) -> bool:
        """Whether the client has been sent anything."""
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """The response, for the handler to return; only once started."""
        assert self._response is not None, "nothing was sent"
        return self._response

    async def __aenter__(self) -> ClientStream:
        self._written_at = self._loop.time()
        self._wait_for_silence(self._keep_alive_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def offer_headers(self, headers: Mapping[str, str]) -> None:
        """Set headers of an answer that has not started; later they are too late, and dropped."""
        if not self.started:
            self.headers.update(headers)

    def _goes_at_once(self, num_bytes: int) -> bool:
        """Whether a write would wait neither for another one nor for the client to read."""
        transport = self._transport
        return (
            transport is not None
            and num_bytes <= _AT_ONCE_BYTES
            and not self._num_writers
            and transport.get_write_buffer_size() == 0
            and not transport.is_closing()
        )

    def send_at_once(self, chunks: Sequence[bytes]) -> bool:
        """Do the same as `send` if nothing has to be waited for; False, and nothing, otherwise."""
        shown = self._shape.take_all(chunks) if self._is_plain else b""
        if not shown or not self._goes_at_once(len(shown)):
            return False
        self.num_events += len(chunks)
        self._write_at_once(shown)
        return True

    async def send(self, chunks: Sequence[bytes]) -> None:
        """Send chunks, at least one, in one write, as the endpoint shows them; wait for the client.

        Raises ConnectionError when it is gone.
        """
        self.num_events += len(chunks)
        await self._write(self._shape.take_all(chunks))

    async def done(self, chunks: Sequence[bytes] = ()) -> None:
        """Send the last chunks, if there are any, and the end marker in one write."""
        self.num_events += len(chunks)
        shown = self._shape.take_all(chunks) if chunks else b""
        await self._write(shown + self._shape.end())

    async def fail(self, error: PrefixFleetError) -> None:
        """Send a typed error as the last event; no end marker follows it."""
        await self._write(self._shape.fail(error))

    async def finish(self) -> None:
        """Close the body."""
        if self._response is not None:
            await self._response.write_eof()

    def _write_at_once(self, data: bytes) -> None:
        """Write one piece of the body as aiohttp's writer would, in six calls less."""
        assert self._transport is not None, "the stream goes on"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self._written_at = self._loop.time()

    async def _write(self, data: bytes) -> None:
        """Write when others have written, and for as long as a client may take to read."""
        if not data:
            return  # To aiohttp nothing, in the chunked encoding the end.
        if self._goes_at_once(len(data)):
            self._write_at_once(data)
            return
        self._num_writers += 1
        try:
            await self._write_in_turn(data)
        finally:
            self._num_writers -= 1

    async def _write_in_turn(self, data: bytes) -> None:
        async with self._write_lock:
            response = self._response or await self._begin()
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await response.write(data)
            except TimeoutError:
                if self._request.transport is not None:
                    self._request.transport.abort()
                raise ConnectionResetError("the client does not read") from None
        self._written_at = self._loop.time()

    async def _begin(self) -> web.StreamResponse:
        """Prepare the response, once; its head leaves with the first data."""
        self._response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **self.headers,
            }
        )
        await self._response.prepare(self._request)
        if self._response.headers.get("transfer-encoding") == "chunked":
            self._transport = self._request.transport
        return self._response

    def _wait_for_silence(self, seconds: float) -> None:
        """Look again later: a timer costs a stream far less than a task that sleeps."""
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        silence_s = self._loop.time() - self._written_at
        if silence_s < self._keep_alive_s:
            self._wait_for_silence(self._keep_alive_s - silence_s)
        else:
            self._keeper = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        try:
            await self._write(KEEP_ALIVE)
        except ConnectionError:
            return  # The handler is being cancelled for the same reason.
        self._wait_for_silence(self._keep_alive_s)
