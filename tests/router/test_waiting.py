"""Requests that wait in the gateway: kept alive, served in turn, refused when it takes too long."""

from __future__ import annotations

import asyncio
from typing import Any

from router.policy.queueing import QueueConfig
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import (
    ACME_KEY,
    GLOBEX_KEY,
    Running,
    completion,
    gateway_spec,
    running_gateway,
)

# At the assumed 1000 tokens/s, one prompt of 50 tokens keeps a replica from taking another.
PROMPT = [5] * 50


def waiting_spec(**queue: Any) -> Any:
    return gateway_spec(queue=QueueConfig(**({"accept_s": 0.04} | queue)), keep_alive_s=0.05)


async def hold_replica(running: Running) -> tuple[asyncio.Event, asyncio.Task[Any]]:
    """Occupy the only replica with a prefill that lasts until the event is set."""
    hold = asyncio.Event()
    running.replicas[0].behaviour = Behaviour(hold=hold)
    first = asyncio.create_task(running.post("/v1/completions", completion(PROMPT)))
    await until(lambda: running.replicas[0].num_running == 1)
    return hold, first


def num_waiting(running: Running) -> int:
    return running.gateway.planner.num_waiting("tiny")


async def test_a_stream_that_waits_is_kept_alive_and_then_served() -> None:
    async with running_gateway(waiting_spec(), replicas=1) as running:
        hold, first = await hold_replica(running)
        headers = {"authorization": f"Bearer {ACME_KEY}"}
        body = completion(PROMPT, stream=True)
        url = running.url + "/v1/completions"
        async with running.session.post(url, json=body, headers=headers) as response:
            assert (await response.content.readline()) == b": keep-alive\n"
            assert len(running.replicas[0].bodies) == 1
            hold.set()
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        assert (await first)[0] == 200
        assert num_waiting(running) == 0


async def test_tenants_take_turns_whoever_came_first() -> None:
    async with running_gateway(waiting_spec(quantum_tokens=50), replicas=1) as running:
        hold, first = await hold_replica(running)
        flood = []
        for i in range(6):
            body = completion([i, *PROMPT])
            flood.append(asyncio.create_task(running.post("/v1/completions", body)))
            await until(lambda i=i: num_waiting(running) == i + 1)  # type: ignore[misc]
        late = asyncio.create_task(
            running.post("/v1/completions", completion([9, *PROMPT]), key=GLOBEX_KEY)
        )
        await until(lambda: num_waiting(running) == 7)
        hold.set()
        answers = await asyncio.gather(first, *flood, late)
        assert [status for status, _, _ in answers] == [200] * 8
        tenants = [body["prefixfleet"]["tenant"] for body in running.replicas[0].bodies]
        assert tenants == ["acme", "globex", *["acme"] * 6]


async def test_waiting_too_long_or_behind_too_many_is_429_with_retry_after() -> None:
    spec = waiting_spec(max_waiting=1, max_wait_s=0.3)
    async with running_gateway(spec, replicas=1) as running:
        hold, first = await hold_replica(running)
        waiting = asyncio.create_task(running.post("/v1/completions", completion(PROMPT)))
        await until(lambda: num_waiting(running) == 1)
        status, answer, headers = await running.post("/v1/completions", completion(PROMPT))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        status, _, headers = await waiting
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        hold.set()
        assert (await first)[0] == 200
        await running.nothing_runs()
        assert num_waiting(running) == 0


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    async with running_gateway(waiting_spec(), replicas=1) as running:
        hold, first = await hold_replica(running)
        gone = asyncio.create_task(running.post("/v1/completions", completion(PROMPT)))
        await until(lambda: num_waiting(running) == 1)
        gone.cancel()
        await until(lambda: num_waiting(running) == 0)
        hold.set()
        assert (await first)[0] == 200
        assert len(running.replicas[0].bodies) == 1
        await running.nothing_runs()


async def test_a_replica_that_joins_serves_those_who_wait() -> None:
    async with running_gateway(waiting_spec(), replicas=1) as running:
        hold, first = await hold_replica(running)
        waiting = asyncio.create_task(running.post("/v1/completions", completion(PROMPT)))
        await until(lambda: num_waiting(running) == 1)
        await running.add(FakeReplica("r1"))
        status, _, headers = await waiting
        assert (status, headers["x-prefixfleet-replica"]) == (200, "r1")
        hold.set()
        assert (await first)[0] == 200


async def test_a_full_fleet_takes_in_those_who_wait_when_a_replica_joins() -> None:
    async with running_gateway(waiting_spec(), replicas=1) as running:
        hold, first = await hold_replica(running)
        other = completion([9, *PROMPT])
        waiting = asyncio.create_task(running.post("/v1/completions", other))
        await until(lambda: num_waiting(running) == 1)
        running.gateway.planner._queues["tiny"].blocked_until = float("inf")
        await running.add(FakeReplica("r1"))
        status, _, headers = await waiting
        assert (status, headers["x-prefixfleet-replica"]) == (200, "r1")
        hold.set()
        assert (await first)[0] == 200


async def test_a_low_priority_is_served_after_a_high_one_and_never_above_its_ceiling() -> None:
    async with running_gateway(waiting_spec(), replicas=1) as running:
        hold, first = await hold_replica(running)
        tasks = []
        for i, priority in enumerate((7, -3, 2)):
            body = completion([i, *PROMPT], priority=priority)
            tasks.append(asyncio.create_task(running.post("/v1/completions", body)))
            await until(lambda i=i: num_waiting(running) == i + 1)  # type: ignore[misc]
        hold.set()
        await asyncio.gather(first, *tasks)
        sent = [body["prefixfleet"]["priority"] for body in running.replicas[0].bodies]
        assert sent == [0, 0, 2, 7]
