"""A replica that says it takes nothing, asleep or about to end, gets nothing from a gateway."""

from __future__ import annotations

import pytest

from kvindex.index import LoadReport
from tests.router.running_gateway import chat, running_gateway

LONG = "the long story of a lonely lighthouse keeper " * 8


@pytest.mark.fault("engine-29")
async def test_a_sleeping_replica_gets_nothing_although_it_had_the_prefix() -> None:
    async with running_gateway(replicas=2) as running:

        async def ask() -> str:
            status, _, headers = await running.post("/v1/chat/completions", chat(LONG))
            assert status == 200
            await running.nothing_runs()
            return headers["x-prefixfleet-replica"]

        home = await ask()
        assert await ask() == home
        asleep, other = sorted(running.replicas, key=lambda replica: replica.id != home)
        await asleep.report(LoadReport(mode="EXACT", draining=True))
        assert {await ask() for _ in range(3)} == {other.id}
        await asleep.report(LoadReport(mode="EXACT"))
        await other.report(LoadReport(mode="EXACT", draining=True))
        assert await ask() == home
