"""The event stream towards one client: started at most once, alive during silence.

It knows nothing of replicas; whoever writes to it decides what and in which order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType

from aiohttp import web

from engine.frontend.sse import DONE, KEEP_ALIVE, encode_error
from kvindex.foundation.errors import PrefixFleetError


class ClientStream:
    """Use as a context: inside it, a comment goes out after every `keep_alive_s` of silence.

    The status line leaves with the first byte of either kind; until then `started` is False and
    an error can still be a plain answer. `headers` may be changed until then.
    """

    def __init__(
        self, request: web.Request, *, keep_alive_s: float, write_timeout_s: float
    ) -> None:
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._response: web.StreamResponse | None = None
        self._write_lock = asyncio.Lock()
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
        self._written_at = asyncio.get_running_loop().time()
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    def offer_headers(self, headers: Mapping[str, str]) -> None:
        """Set headers of an answer that has not started; later they are too late, and dropped."""
        if not self.started:
            self.headers.update(headers)

    async def send(self, data: bytes) -> None:
        """Send one data event; waits for a slow client. Raises ConnectionError when it is gone."""
        self.num_events += 1
        await self._write(b"data: " + data + b"\n\n")

    async def done(self) -> None:
        """Send the end marker."""
        await self._write(DONE)

    async def fail(self, error: PrefixFleetError) -> None:
        """Send a typed error as the last event; no end marker follows it."""
        await self._write(encode_error(error))

    async def finish(self) -> None:
        """Close the body."""
        if self._response is not None:
            await self._response.write_eof()

    async def _write(self, data: bytes) -> None:
        async with self._write_lock:
            if self._response is None:
                self._response = web.StreamResponse(
                    headers={
                        "content-type": "text/event-stream; charset=utf-8",
                        "cache-control": "no-cache",
                        "x-accel-buffering": "no",
                        **self.headers,
                    }
                )
                await self._response.prepare(self._request)
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await self._response.write(data)
            except TimeoutError:
                if self._request.transport is not None:
                    self._request.transport.abort()
                raise ConnectionResetError("the client does not read") from None
            self._written_at = asyncio.get_running_loop().time()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silence_s = loop.time() - self._written_at
            if silence_s < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silence_s)
                continue
            try:
                await self._write(KEEP_ALIVE)
            except ConnectionError:
                return  # The handler is being cancelled for the same reason.
