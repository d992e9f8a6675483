"""A TCP connection to a server that a test can cut, as the death of its process would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

_READ_S = 0.05
"""Time for what was passed on to be read before the connection is reset."""


class Cable:
    """Passes bytes on between a free port and a server; `cut` ends all of it until `mend`."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._host, self._port = target.hostname, target.port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.cut_after_bytes: int | None = None
        self.cut_after_event: bytes | None = None
        self.num_bytes = 0
        self.url = ""

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", port)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def cut(self) -> None:
        """Refuse new connections and reset the others, also those that are just being opened."""
        self._is_cut = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def mend(self) -> None:
        """Take connections again where they were taken before."""
        self._is_cut = False
        await self.start(urlsplit(self.url).port or 0)

    async def _connect(self, near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self._writers.add(client)
        try:
            far, server = await asyncio.open_connection(self._host, self._port)
        except OSError:
            client.transport.abort()
            self._writers.discard(client)
            return
        self._writers.add(server)
        if self._is_cut:  # since this connection began
            self.cut()
        await asyncio.gather(
            self._pass_on(near, server), self._answer(far, client), return_exceptions=True
        )
        for writer in (client, server):
            writer.close()
            self._writers.discard(writer)

    async def _pass_on(self, near: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await near.read(65536):
            server.write(data)
        server.close()

    async def _answer(self, far: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await far.read(65536):
            if self.cut_after_event is not None and self.cut_after_event in data:
                await self._cut_after(data, self.cut_after_event, client)
                return
            client.write(data)
            await client.drain()
            self.num_bytes += len(data)
            if self.cut_after_bytes is not None and self.num_bytes > self.cut_after_bytes:
                self.cut()
        client.close()

    async def _cut_after(self, data: bytes, text: bytes, client: asyncio.StreamWriter) -> None:
        """Pass on up to the end of the event with this text, and nothing more."""
        end = data.index(b"\n\n", data.index(text)) + 2
        client.write(data[:end])
        await client.drain()
        await asyncio.sleep(_READ_S)
        self.cut()


@asynccontextmanager
async def cable_to(url: str) -> AsyncIterator[Cable]:
    """Lay a cable to a server and take it away in the end."""
    cable = Cable(url)
    await cable.start()
    try:
        yield cable
    finally:
        cable.cut()
