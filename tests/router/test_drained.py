"""A replica that was told to end: what it holds moves on, and nobody pays for that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvindex.index import LoadReport
from router.config import GatewaySpec
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import Running, chat, gateway_spec, running_gateway

REFUSES = Behaviour(status=503, error={"message": "shutting down", "code": "draining"})


def strict(**router: Any) -> GatewaySpec:
    """Return a spec in which a failure is final, and nothing is left for retries."""
    return gateway_spec(max_attempts=1, retry_share=0.0, retry_burst=1, **router)


async def drain(running: Running, replica: FakeReplica) -> None:
    """Have a replica say that it is draining; return once the gateway knows."""
    await replica.report(LoadReport(mode="EXACT", draining=True))
    seen = next(r for r in running.gateway.view.replicas if r.id == replica.id)
    await until(lambda: seen.report.draining)


async def test_a_refusal_of_a_draining_replica_costs_neither_attempt_nor_retry_nor_breaker() -> (
    None
):
    async with running_gateway(strict()) as running:
        refusing = running.replicas[0]
        refusing.behaviour = REFUSES
        for i in range(12):
            status, _, headers = await running.post("/v1/chat/completions", chat(f"{i}"))
            assert (status, headers["x-prefixfleet-replica"]) == (200, "r1")
        assert len(refusing.bodies) > 3
        now = running.gateway.clock.monotonic()
        assert running.gateway.planner.breaker_state("r0", now) == "closed"


async def test_when_all_are_draining_the_client_is_told_to_come_back() -> None:
    async with running_gateway(strict()) as running:
        for replica in running.replicas:
            replica.behaviour = REFUSES
        status, answer, headers = await running.post("/v1/chat/completions", chat("x"))
        assert (status, answer["error"]["code"]) == (503, "no_available_replica")
        assert headers["retry-after"] == "1"
        assert sum(len(replica.bodies) for replica in running.replicas) == 2


async def test_a_stream_that_a_draining_replica_cuts_off_goes_on_elsewhere_as_often_as_needed() -> (
    None
):
    """More often than there are attempts, and also on a replica that has come back since."""
    async with running_gateway(strict()) as running:
        holds = [asyncio.Event(), asyncio.Event()]
        for replica, hold, die_at in zip(running.replicas, holds, (1, 2), strict=True):
            replica.behaviour = Behaviour(hold=hold, die_at=die_at, num_words=4)
        one, other = running.replicas
        asking = asyncio.create_task(read(running))
        await until(lambda: one.num_running + other.num_running == 1)
        first, second = (one, other) if one.num_running else (other, one)
        first.behaviour.die_at, second.behaviour.die_at = 1, 2
        await drain(running, first)
        holds[running.replicas.index(first)].set()
        await until(lambda: second.num_running == 1)
        first.behaviour = Behaviour(num_words=4)
        record = await running.register(first)
        await until(lambda: running.knows(record))
        await drain(running, second)
        holds[running.replicas.index(second)].set()
        assert await asking == [None, "w0 ", "w1 ", "w2 ", "w3 "]
        now = running.gateway.clock.monotonic()
        states = {running.gateway.planner.breaker_state(r.id, now) for r in running.replicas}
        assert states == {"closed"}


async def read(running: Running) -> list[str | None]:
    """Read one stream: the text of each chunk."""
    async with running.session.post(
        f"{running.url}/v1/chat/completions",
        json=chat("x", stream=True),
        headers={"authorization": "Bearer sk-acme-0123456789"},
    ) as response:
        lines = (await response.text()).splitlines()
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event)["choices"][0]["delta"].get("content") for event in events[:-1]]


async def test_a_gateway_that_retires_serves_on_and_sends_clients_away_with_each_answer() -> None:
    async with running_gateway(replicas=1) as running:
        _, _, headers = await running.post("/v1/chat/completions", chat("x"))
        assert "connection" not in headers
        running.gateway.admission.retire()
        status, _, headers = await running.post("/v1/chat/completions", chat("x"))
        assert (status, headers["connection"]) == (200, "close")
        async with running.session.post(
            f"{running.url}/v1/chat/completions",
            json=chat("x", stream=True),
            headers={"authorization": "Bearer sk-acme-0123456789"},
        ) as response:
            assert response.headers["connection"] == "close"
            assert (await response.text()).endswith("data: [DONE]\n\n")
