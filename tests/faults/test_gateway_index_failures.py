"""The index away, slow, or back empty: serving goes on, and says what it has lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvindex.index import LoadReport
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import (
    MemoryStores,
    Running,
    chat,
    completion,
    gateway_spec,
    running_gateway,
)

LONG = chat("a long enough prompt to have several blocks in the cache " * 4)


async def test_without_the_index_requests_are_served_in_fallback_and_health_says_so() -> None:
    async with running_gateway() as running:
        running.stores.down = True
        for i in range(4):
            status, _, headers = await running.post("/v1/completions", completion(f"{i}"))
            assert (status, headers["x-prefixfleet-mode"]) == (200, "FALLBACK")
            assert headers["x-prefixfleet-cached-tokens-predicted"] == "0"
        assert [len(replica.bodies) for replica in running.replicas] == [2, 2]
        async with running.session.get(running.url + "/health") as response:
            health = await response.json()
        assert (response.status, health["mode"]) == (200, "FALLBACK")
        assert health["index"]["reachable"] is False
        assert "connection refused" in health["index"]["reason"]
        _, metrics = await running.admin("/metrics")
        assert "prefixfleet_index_up 0.0" in metrics
        assert 'prefixfleet_replica_mode{mode="FALLBACK",replica="r0"} 1.0' in metrics
        running.stores.down = False
        await until(lambda: running.gateway.view.index_is_up)
        _, _, headers = await running.post("/v1/completions", completion("again"))
        assert headers["x-prefixfleet-mode"] == "EXACT"


@asynccontextmanager
async def without_poller(**router: Any) -> AsyncIterator[Running]:
    """Run a gateway whose poller has looked once and sleeps: only requests touch the stores."""
    async with running_gateway(gateway_spec(poll_s=3600.0, **router), replicas=0) as running:
        replica = FakeReplica("r0")
        await replica.start()
        running.replicas.append(replica)
        await running.register(replica)
        await running.gateway.view.refresh()
        yield running


async def test_a_store_that_is_down_is_not_asked_again_by_requests() -> None:
    async with without_poller() as running:
        running.stores.down = True
        await running.post("/v1/completions", completion("the one that finds out"))
        asked = running.stores.num_calls
        for i in range(5):
            status, _, _ = await running.post("/v1/completions", completion(f"{i}"))
            assert status == 200
        assert running.stores.num_calls == asked


async def test_a_store_that_does_not_answer_costs_two_timeouts_and_then_nothing() -> None:
    async with without_poller(index_timeout_s=0.05) as running:
        running.stores.silent = True
        status, _, headers = await running.post("/v1/completions", completion("x"))
        assert (status, headers["x-prefixfleet-mode"]) == (200, "FALLBACK")
        await until(lambda: not running.gateway.view.index_is_up)
        asked = running.stores.num_calls
        for i in range(5):
            status, _, _ = await running.post("/v1/completions", completion(f"{i}"))
            assert status == 200
        assert running.stores.num_calls == asked


async def test_a_release_that_could_not_be_delivered_is_delivered_when_the_index_is_back() -> None:
    async with running_gateway(replicas=1) as running:
        (replica,) = running.replicas
        hold = asyncio.Event()
        replica.behaviour = Behaviour(hold=hold)
        call = asyncio.create_task(running.post("/v1/completions", completion("x")))
        await until(lambda: running.index_load()[0] == 1)
        running.stores.down = True
        await until(lambda: not running.gateway.view.index_is_up)
        hold.set()
        # The fake replica stores its blocks in the index itself, which only the gateway has lost.
        assert (await call)[0] == 200
        assert running.num_active() == 0
        assert running.index_load()[0] == 1
        running.stores.down = False
        await running.nothing_runs()


async def test_an_index_that_came_back_empty_loses_no_request_and_nothing_is_doubled() -> None:
    async with running_gateway() as running:
        await running.post("/v1/chat/completions", LONG)
        running.stores.clear()
        for i in range(6):
            status, _, headers = await running.post("/v1/completions", completion(f"{i}"))
            assert (status, headers["x-prefixfleet-mode"]) == (200, "FALLBACK")
        for replica in running.replicas:
            replica.behaviour = Behaviour()
            record = await running.register(replica)
            await until(lambda record=record: running.knows(record))  # type: ignore[misc]
        _, _, headers = await running.post("/v1/chat/completions", LONG)
        assert headers["x-prefixfleet-mode"] == "EXACT"
        assert len(running.gateway.view.replicas) == 2


@pytest.mark.fault("router-5")
async def test_a_replica_that_publishes_no_events_is_shown_as_fallback_with_the_reason() -> None:
    async with running_gateway(replicas=1) as running:
        report = LoadReport(mode="FALLBACK", reason="no events since registration")
        await running.replicas[0].report(report)
        await until(lambda: running.gateway.view.replicas[0].report == report)
        _, listed = await running.admin("/admin/replicas")
        (shown,) = listed["replicas"]
        assert (shown["mode"], shown["reason"]) == ("FALLBACK", "no events since registration")
        _, _, headers = await running.post("/v1/completions", completion("x"))
        assert headers["x-prefixfleet-mode"] == "FALLBACK"


async def test_a_gateway_starts_while_the_index_is_down_and_joins_when_it_comes() -> None:
    stores = MemoryStores()
    stores.down = True
    async with running_gateway(stores=stores, replicas=0) as running:
        status, answer, _ = await running.post("/v1/completions", completion("x"))
        assert (status, answer["error"]["code"]) == (503, "no_available_replica")
        async with running.session.get(running.url + "/ready") as response:
            assert response.status == 503
            assert (await response.json())["index"]["reachable"] is False
        stores.down = False
        await running.add(FakeReplica("r0"))
        status, _, _ = await running.post("/v1/completions", completion("x"))
        assert status == 200
