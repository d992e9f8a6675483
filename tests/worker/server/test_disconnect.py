"""A client that goes away, at any moment, takes its work in the engine with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.worker.server.replica import RunningReplica, running_replica, until

BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": list(range(40)),
    "max_tokens": 450,
    "ignore_eos": True,
    "temperature": 0,
}


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with running_replica(step_s=0.01) as running:
        yield running


def num_live(replica: RunningReplica) -> int:
    return len(replica.core.scheduler.requests)


async def leave_while_streaming(replica: RunningReplica, body: dict[str, Any]) -> None:
    """Read three events of a stream, then close the connection."""
    async with replica.session.post(
        replica.url + "/v1/completions", json=body | {"stream": True}
    ) as response:
        for _ in range(3):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
        assert num_live(replica) > 0
        response.close()


@pytest.mark.fault("router-41")
async def test_a_stream_that_is_left_frees_its_blocks_within_a_second(
    replica: RunningReplica,
) -> None:
    await leave_while_streaming(replica, BODY)
    await until(lambda: replica.is_idle, timeout_s=1.0)
    assert replica.client.stats.generation_tokens_total < 450
    await until(lambda: replica.front.num_active == 0, timeout_s=1.0)


@pytest.mark.fault("router-41")
async def test_an_answer_that_nobody_waits_for_frees_its_blocks_within_a_second(
    replica: RunningReplica,
) -> None:
    waiting = asyncio.create_task(replica.post("/v1/completions", BODY))
    await until(lambda: num_live(replica) == 1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await until(lambda: replica.is_idle, timeout_s=1.0)
    assert replica.client.stats.generation_tokens_total < 450


@pytest.mark.fault("engine-10")
@pytest.mark.parametrize("stream", [False, True])
async def test_all_choices_go_with_the_client(replica: RunningReplica, stream: bool) -> None:
    body = BODY | {"n": 4}
    if stream:
        await leave_while_streaming(replica, body)
    else:
        waiting = asyncio.create_task(replica.post("/v1/completions", body))
        await until(lambda: num_live(replica) == 4)
        waiting.cancel()
    await until(lambda: replica.is_idle, timeout_s=1.0)
    assert num_live(replica) == 0
    await until(lambda: replica.front.num_active == 0)
    assert await num_finished(replica, "abort") == 4


@pytest.mark.fault("engine-11")
async def test_one_request_id_may_be_live_twice_and_an_abort_hits_only_its_own(
    replica: RunningReplica,
) -> None:
    headers = {"x-request-id": "same"}
    first = asyncio.create_task(replica.post("/v1/completions", BODY, **headers))
    second = asyncio.create_task(
        replica.post("/v1/completions", BODY | {"max_tokens": 40}, **headers)
    )
    await until(lambda: num_live(replica) == 2)
    first.cancel()
    await until(lambda: num_live(replica) == 1)
    third = asyncio.create_task(
        replica.post("/v1/completions", BODY | {"max_tokens": 40}, **headers)
    )
    answers = [await second, await third]
    assert [status for status, _ in answers] == [200, 200]
    texts = [answer["choices"][0]["text"] for _, answer in answers]
    assert texts[0] == texts[1]
    await until(lambda: replica.is_idle)


@pytest.mark.fault("engine-35")
async def test_leaving_before_the_first_step_and_after_the_last_is_clean(
    replica: RunningReplica,
) -> None:
    for delay_s in (0.0, 0.001, 0.004, 0.01, 0.03):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await replica.post("/v1/completions", BODY)
    await until(lambda: replica.is_idle and replica.front.num_active == 0)
    status, _ = await replica.post("/v1/completions", BODY | {"max_tokens": 3})
    assert status == 200
    await until(lambda: replica.is_idle)


@pytest.mark.fault("engine-35")
async def test_a_hundred_clients_that_come_and_go_leave_nothing(replica: RunningReplica) -> None:
    async def come_and_go(i: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.002 * (i % 25)):
                await replica.post("/v1/completions", BODY | {"n": 1 + i % 2, "stream": i % 3 == 0})

    await asyncio.gather(*(come_and_go(i) for i in range(100)), return_exceptions=True)
    await until(lambda: replica.is_idle and replica.front.num_active == 0)


@pytest.mark.fault("router-41")
async def test_the_official_client_may_leave_a_stream(replica: RunningReplica) -> None:
    async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key="x") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "the"}],
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: replica.is_idle, timeout_s=1.0)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_given_up() -> None:
    # More than the kernel buffers for a connection, so that writing must wait for the reader.
    body = json.dumps(BODY | {"stream": True, "n": 100, "return_token_ids": True}).encode()
    async with running_replica(write_timeout_s=0.2) as replica:
        host, port = replica.url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(head.encode() + body)
            await until(lambda: replica.front.num_active == 1)
            await until(lambda: replica.front.num_active == 0 and replica.is_idle, timeout_s=15)
        assert await num_finished(replica, "abort") > 0


async def num_finished(replica: RunningReplica, reason: str) -> float:
    """Read from the metrics how many choices ended for a reason."""
    async with replica.session.get(replica.url + "/metrics") as response:
        text = await response.text()
    name = f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="tiny"}}'
    (value,) = (line.split()[-1] for line in text.splitlines() if line.startswith(name))
    return float(value)
