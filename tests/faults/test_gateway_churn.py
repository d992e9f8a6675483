"""Replicas come and go while requests are placed: none fails, and nothing stays behind."""

from __future__ import annotations

import asyncio

import pytest

from kvindex.index import LoadReport
from tests.conditions import until
from tests.router.fake_replica import FakeReplica
from tests.router.running_gateway import Running, chat, completion, gateway_spec, running_gateway

ROUNDS = 10


async def come_and_go(running: Running, name: str, *, dies: bool) -> None:
    """Add a replica and take it away again, as a drain or as a death does."""
    for _ in range(ROUNDS):
        replica = FakeReplica(name)
        await running.add(replica)
        if not dies:
            await drain(running, replica)
        await replica.stop()
        running.replicas.remove(replica)
        await replica.leave()


async def drain(running: Running, replica: FakeReplica) -> None:
    """Return when the gateway knows of the drain and has nothing there any more."""
    await replica.report(LoadReport(mode="EXACT", draining=True))
    view, ledger = running.gateway.view, running.gateway.planner.ledger

    def is_drained() -> bool:
        known = [r.report.draining for r in view.replicas if r.id == replica.id]
        return known == [True] and not ledger.account(replica.target).num_active

    await until(is_drained)


async def ask(running: Running, client: int, done: asyncio.Event) -> list[int]:
    """Send one request after the other until told to stop; return their statuses."""
    statuses: list[int] = []
    while not done.is_set():
        number = len(statuses)
        if number % 2:
            path, body = "/v1/completions", completion([client, number % 7] * 20)
        else:
            path, body = "/v1/chat/completions", chat(f"client {client} turn {number}")
        status, _, _ = await running.post(path, body)
        statuses.append(status)
    return statuses


@pytest.mark.fault("router-34")
@pytest.mark.parametrize("policy", ["prefix_cost", "session", "power_of_two", "longest_prefix"])
async def test_placing_adding_and_removing_at_the_same_time_fails_no_request(policy: str) -> None:
    # One more than x0 dies: nothing keeps a request from meeting each of its deaths.
    spec = gateway_spec(default_policy=policy, max_attempts=ROUNDS + 1)
    async with running_gateway(spec, replicas=2) as running:
        done = asyncio.Event()
        clients = [asyncio.create_task(ask(running, i, done)) for i in range(6)]
        await asyncio.gather(*(come_and_go(running, f"x{i}", dies=i == 0) for i in range(4)))
        done.set()
        statuses = [status for found in await asyncio.gather(*clients) for status in found]
        assert len(statuses) > 20
        assert set(statuses) == {200}
        await running.nothing_runs()
        assert running.gateway.planner.num_waiting("tiny") == 0
