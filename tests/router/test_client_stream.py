"""The stream towards a client is the same whether its pieces go at once or wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from engine.frontend.errors import RequestError
from engine.frontend.sse import PlainEvents
from router.request.client_stream import ClientStream

BIG = 40_000 * b"x"


class Quiet(PlainEvents):
    """Shows nothing of chunks that say so."""

    def take_all(self, chunks: Sequence[bytes]) -> bytes:
        shown = [chunk for chunk in chunks if chunk != b"quiet"]
        return super().take_all(shown) if shown else b""


async def streamed(
    talk: Callable[[ClientStream], Awaitable[None]],
    *,
    shape: PlainEvents | None = None,
    version: str = "1.1",
) -> bytes:
    """Return all that a client of HTTP/1.0 or 1.1 gets of a stream, behind the head."""

    async def answer(request: web.Request) -> web.StreamResponse:
        async with ClientStream(
            request, keep_alive_s=5.0, write_timeout_s=5.0, shape=shape
        ) as stream:
            await talk(stream)
            await stream.finish()
        return stream.response

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server:
        if version == "1.1":
            async with ClientSession() as session, session.get(server.make_url("/")) as response:
                return await response.read()
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        received = await reader.read(-1)
        writer.close()
        return received.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_every_piece_arrives_in_order(version: str) -> None:
    async def talk(stream: ClientStream) -> None:
        assert not stream.send_at_once([b"a"])
        await stream.send([b"a"])
        for piece in (b"b", BIG, b"c"):
            if not stream.send_at_once([piece, piece]):
                await stream.send([piece, piece])
        await stream.done([b"d"])
        assert stream.num_events == 8

    pieces = (b"a", b"b", b"b", BIG, BIG, b"c", b"c", b"d", b"[DONE]")
    assert await streamed(talk, version=version) == b"".join(b"data: %b\n\n" % p for p in pieces)


async def test_what_shows_nothing_does_not_end_the_stream() -> None:
    async def talk(stream: ClientStream) -> None:
        await stream.send([b"a"])
        await stream.send([b"quiet"])
        assert not stream.send_at_once([b"quiet"])
        await stream.done([b"b"])

    assert await streamed(talk, shape=Quiet()) == b"data: a\n\ndata: b\n\ndata: [DONE]\n\n"


async def test_an_error_is_the_last_event() -> None:
    async def talk(stream: ClientStream) -> None:
        await stream.send([b"a"])
        await stream.fail(RequestError("overloaded", "no more"))

    received = await streamed(talk)
    assert received.startswith(b'data: a\n\ndata: {"error":{"message":"no more"')
    assert b"[DONE]" not in received
