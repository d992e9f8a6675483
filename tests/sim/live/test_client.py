"""What the client makes of servers: answers, refusals, broken streams, silence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from kvindex.foundation.errors import DependencyError, PrefixFleetError
from sim.live.client import LiveClient, connected
from sim.live.drive import Driver
from sim.live.fleet_settings import FleetAddress
from sim.live.measure import MeasurePlan, Measurer
from sim.live.messages import Completion, Received
from sim.live.prompts import PromptMaker
from tests.redis_server import free_port
from tests.sim.replaying import HEADER, row

WANTED = Completion(model="m", prompt=[1, 2, 3], num_output_tokens=2)

USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
)
TOKEN = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[LiveClient]:
    """Serve completions by a handler and connect to it."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with connected(FleetAddress(url=url, key="sk")) as client:
            yield client
    finally:
        await runner.cleanup()


def streaming(*events: bytes) -> Handler:
    """Answer every request with these events."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "x-prefixfleet-replica": "r0",
                "x-prefixfleet-cached-tokens-predicted": "2",
                "x-request-id": "id",
            }
        )
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return answer


async def received(handler: Handler) -> Received:
    async with server(handler) as client:
        return await client.complete(WANTED)


async def test_an_answer_is_read_to_its_usage() -> None:
    seen = await received(streaming(b": keep-alive\n\n", TOKEN, TOKEN, USAGE, DONE))
    assert (seen.replica, seen.request_id, seen.num_predicted_tokens) == ("r0", "id", 2)
    assert (seen.num_prompt_tokens, seen.num_cached_tokens, seen.num_output_tokens) == (3, 1, 2)
    assert len(seen.token_at) == 2
    assert seen.error is None


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((TOKEN,), "the stream ended without usage"),
        ((TOKEN, b'data: {"error":{"message":"replica lost"}}\n\n'), "replica lost"),
        ((b"data: {nonsense\n\n",), "a chunk that cannot be read"),
    ],
)
async def test_a_broken_stream_is_an_answer_with_an_error(
    events: tuple[bytes, ...], error: str
) -> None:
    seen = await received(streaming(*events))
    assert seen.error is not None
    assert seen.error.startswith(error)


async def test_a_refusal_is_an_answer_with_the_servers_words() -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    seen = await received(refuse)
    assert (seen.status, seen.error) == (400, "too long")


async def test_nobody_there_is_a_dependency_error_also_among_many_requests() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    rows = [row(line, 0.0, [line]) for line in range(1, 4)]
    async with connected(FleetAddress(url=url, key=None)) as client:
        driver = Driver(client, PromptMaker(HEADER), model="m", done=lambda: None)
        with pytest.raises(DependencyError, match="does not answer"):
            await driver.by_the_clock(rows, speed_up=1.0)


async def test_a_calibration_ends_with_the_servers_refusal() -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no ids please"}}, status=400)

    plan = MeasurePlan(model="m", max_prompt=128, vocab_size=256, seed=1)
    async with server(refuse) as client:
        with pytest.raises(PrefixFleetError, match=r"prompt of 128 tokens .*: no ids please"):
            await Measurer(client, plan, lambda: None).measure()


async def test_a_calibration_asks_as_often_as_it_says() -> None:
    asked = 0

    def done() -> None:
        nonlocal asked
        asked += 1

    plan = MeasurePlan(model="m", max_prompt=128, repeats=2, vocab_size=256, seed=1)
    async with server(streaming(TOKEN, TOKEN, USAGE, DONE)) as client:
        samples = await Measurer(client, plan, done).measure()
    assert asked == plan.num_requests
    assert [sample.what for sample in samples[:2]] == [
        "first token, 3 new",
        "first token, 3 repeated",
    ]


def test_a_step_is_counted_as_long_as_the_servers_limits_allow() -> None:
    by_tokens = MeasurePlan(model="m", max_step_tokens=512, vocab_size=256, seed=1)
    assert by_tokens.step_tokens(60.0) == 512
    by_time = msgspec.structs.replace(by_tokens, max_step_s=0.5)
    assert [by_time.step_tokens(speed) for speed in (60.0, 400.0, 5000.0)] == [32, 200, 512]
