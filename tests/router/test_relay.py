"""What a replica sends in one piece is read and passed on as one, up to whatever is wrong in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.fleet.client import ReplicaClient, ReplicaFailure
from router.request.chunks import Chunk
from router.request.relay import Relay
from router.request.sinks import FoldSink, Sink
from tests.conditions import until

ROLE = b'{"choices":[{"index":0,"delta":{"role":"assistant"}}]}'
HELLO = b'{"choices":[{"index":0,"delta":{"content":"Hello"}}]}'
WORLD = b'{"choices":[{"index":0,"delta":{"content":" world"}}]}'


def events(*chunks: bytes) -> bytes:
    return b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks)


@dataclass(slots=True)
class SeenSink:
    """Notes what happens to it, in order; `waits` for whoever it passes chunks on to."""

    seen: list[bytes | str] = field(default_factory=list)
    waits: bool = True

    def accept(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> None:
        assert len(data) == len(chunks)
        self.seen += data

    def pass_on(self, data: Sequence[bytes], chunks: Sequence[Chunk]) -> bool:
        if not self.waits:
            self.accept(data, chunks)
        return self.flush_at_once()

    def flush_at_once(self) -> bool:
        if not self.waits:
            self.seen.append("at once")
        return not self.waits

    async def flush(self) -> None:
        self.seen.append("flush")

    async def done(self) -> None:
        self.seen.append("done")

    def restart(self) -> bool:
        return False


async def relayed(sent: bytes, sink: Sink, *later: bytes) -> list[str]:
    """Relay a body that comes in one piece; return what the relay has told of it.

    What comes `later` is sent, piece by piece, when something was told of the piece before.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sent)
        for piece in later:
            told = len(noted)
            await until(lambda told=told: len(noted) > told)  # type: ignore[misc]
            await response.write(piece)
        return response

    app, client = web.Application(), ReplicaClient(connect_timeout_s=5)
    app.router.add_post("/", answer)
    noted: list[str] = []
    try:
        async with TestServer(app) as server, asyncio.timeout(10) as limit:
            url = str(server.make_url("/"))
            with await client.post(url, b"{}", headers={}, replica="r0") as upstream:
                await Relay(
                    sink,
                    replica="r0",
                    limit=limit,
                    stall_s=5,
                    on_output=lambda: noted.append("output"),
                    on_chunks=lambda chunks: noted.append(f"{len(chunks)} chunks"),
                ).run(upstream)
    finally:
        client.close()
    return noted


async def test_chunks_that_come_together_go_with_the_end_marker() -> None:
    sink = SeenSink()
    noted = await relayed(events(ROLE, HELLO, WORLD, b"[DONE]"), sink)
    assert sink.seen == [ROLE, HELLO, WORLD, "done"]
    assert noted == ["output", "3 chunks"]


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


async def test_pieces_of_a_stream_are_passed_on_one_by_one() -> None:
    sink = SeenSink(waits=False)
    noted = await relayed(
        events(ROLE, HELLO), sink, events(WORLD), events(WORLD, WORLD), events(HELLO, b"[DONE]")
    )
    assert noted == ["output", "2 chunks", "1 chunks", "2 chunks", "1 chunks"]
    passed_on = [ROLE, HELLO, "at once", WORLD, "at once", WORLD, WORLD, "at once", HELLO, "done"]
    assert sink.seen == passed_on


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (events(b'{"choices":'), "r0 sent no chunk"),
        (events(b'{"error":{"message":"no more"}}'), "r0 gave up: no more"),
        (b"data: {", r"ended its stream without \[DONE\]"),
    ],
)
async def test_a_piece_that_is_wrong_ends_the_stream_behind_those_before_it(
    last: bytes, reason: str
) -> None:
    sink = SeenSink(waits=False)
    with pytest.raises(ReplicaFailure, match=reason):
        await relayed(events(HELLO), sink, events(WORLD), events(HELLO) + last)
    assert sink.seen[:4] == [HELLO, "at once", WORLD, "at once"]
    assert sink.seen[4:] == [HELLO, "at once"]


async def test_an_event_in_two_pieces_is_one() -> None:
    sink, half = SeenSink(waits=False), len(WORLD) // 2
    sent = events(HELLO) + b"data: " + WORLD[:half]
    await relayed(sent, sink, WORLD[half:] + b"\n\n" + events(HELLO, b"[DONE]"))
    assert sink.seen == [HELLO, "at once", WORLD, HELLO, "done"]
