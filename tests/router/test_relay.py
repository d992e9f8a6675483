"""What a replica sends in one piece is read and passed on as one, up to whatever is wrong in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.fleet.client import ReplicaClient, ReplicaFailure
from router.request.chunks import Chunk
from router.request.relay import FoldSink, Relay, Sink

ROLE = b'{"choices":[{"index":0,"delta":{"role":"assistant"}}]}'
HELLO = b'{"choices":[{"index":0,"delta":{"content":"Hello"}}]}'
WORLD = b'{"choices":[{"index":0,"delta":{"content":" world"}}]}'


def events(*chunks: bytes) -> bytes:
    return b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks)


@dataclass(slots=True)
class SeenSink:
    """Notes what happens to it, in order."""

    seen: list[bytes | str] = field(default_factory=list)

    def accept(self, data: bytes, chunk: Chunk) -> None:
        self.seen.append(data)

    async def flush(self) -> None:
        self.seen.append("flush")

    async def done(self) -> None:
        self.seen.append("done")

    def restart(self) -> bool:
        return False


async def relayed(sent: bytes, sink: Sink) -> list[str]:
    """Relay a body that comes in one piece; return whether and after how many chunks it spoke."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sent)
        return response

    app, client = web.Application(), ReplicaClient(connect_timeout_s=5)
    app.router.add_post("/", answer)
    noted: list[str] = []
    await client.start()
    try:
        async with TestServer(app) as server, asyncio.timeout(10) as limit:
            url = str(server.make_url("/"))
            with await client.post(url, b"{}", headers={}, replica="r0") as upstream:
                await Relay(
                    sink,
                    replica="r0",
                    limit=limit,
                    stall_s=5,
                    slow_client_s=1,
                    on_output=lambda: noted.append("output"),
                    on_chunk=lambda chunk: noted.append("chunk"),
                ).run(upstream)
    finally:
        await client.close()
    return noted


async def test_chunks_that_come_together_go_with_the_end_marker() -> None:
    sink = SeenSink()
    noted = await relayed(events(ROLE, HELLO, WORLD, b"[DONE]"), sink)
    assert sink.seen == [ROLE, HELLO, WORLD, "done"]
    assert noted == ["chunk", "output", "chunk", "chunk"]


async def test_what_came_before_a_chunk_that_is_none_is_passed_on() -> None:
    sink = SeenSink()
    with pytest.raises(ReplicaFailure, match="r0 sent no chunk") as caught:
        await relayed(events(HELLO, b'{"choices":', WORLD), sink)
    assert (caught.value.cause, sink.seen) == ("lost", [HELLO, "flush"])


@pytest.mark.parametrize(("code", "cause"), [("engine_dead", "lost"), ("overloaded", "gave_up")])
async def test_what_came_before_a_replica_gave_up_is_passed_on(code: str, cause: str) -> None:
    sink, error = SeenSink(), b'{"error":{"message":"no more","code":"%s"}}' % code.encode()
    with pytest.raises(ReplicaFailure, match="r0 gave up: no more") as caught:
        await relayed(events(HELLO, error, WORLD), sink)
    assert (caught.value.cause, sink.seen) == (cause, [HELLO, "flush"])


async def test_a_stream_without_an_end_marker_is_lost() -> None:
    sink = SeenSink()
    with pytest.raises(ReplicaFailure, match=r"ended its stream without \[DONE\]") as caught:
        await relayed(events(HELLO), sink)
    assert (caught.value.cause, sink.seen) == ("lost", [HELLO, "flush"])


@pytest.mark.parametrize("noise", [b'{"choices":[{"index":0}]}', b'{"id":1,"choices":[]}'])
async def test_chunks_of_another_shape_are_no_whole_answer(noise: bytes) -> None:
    with pytest.raises(ReplicaFailure, match="r0: chunk of a replica") as caught:
        await relayed(events(noise, b"[DONE]"), FoldSink("chat/completions"))
    assert caught.value.cause == "lost"
