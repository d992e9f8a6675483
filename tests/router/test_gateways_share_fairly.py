"""Two gateways on one Redis: fair shares and the retry budget are those of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.policy.queueing import QueueConfig
from tests.conditions import until
from tests.redis_server import RedisServer
from tests.router.fake_replica import Behaviour
from tests.router.running_gateway import (
    ACME_KEY,
    GLOBEX_KEY,
    MemoryStores,
    Running,
    completion,
    gateway_spec,
    running_gateway,
)
from tests.router.tenancy.fleet import over


@asynccontextmanager
async def gateways(
    server: RedisServer, *, replicas: int, **router: Any
) -> AsyncIterator[tuple[Running, Running]]:
    """Run two gateways before the same replicas, with their state in one Redis."""
    spec, stores = gateway_spec(**router), MemoryStores()
    async with (
        running_gateway(
            spec, replicas=replicas, stores=stores, id="one", tenancy=over(server)
        ) as one,
        running_gateway(spec, replicas=0, stores=stores, id="two", tenancy=over(server)) as two,
    ):
        await until(lambda: len(two.gateway.view.replicas) == replicas)
        yield one, two


@pytest.mark.fault("router-56")
async def test_a_flood_at_one_gateway_lets_another_tenant_through_at_the_other(
    private_redis: RedisServer,
) -> None:
    # At the assumed 1000 tokens/s, one prompt of 50 tokens keeps the replica from taking another.
    queue = QueueConfig(accept_s=0.04, quantum_tokens=100)
    async with gateways(private_redis, replicas=1, queue=queue) as (one, two):
        hold = asyncio.Event()
        replica = one.replicas[0]
        replica.behaviour = Behaviour(hold=hold)
        flood = [
            asyncio.create_task(one.post("/v1/completions", completion([i + 1] * 50), key=ACME_KEY))
            for i in range(60)
        ]
        await until(lambda: one.gateway.planner.num_waiting_of("acme") == 59)
        short = asyncio.create_task(
            two.post("/v1/completions", completion([200] * 50), key=GLOBEX_KEY)
        )
        await until(lambda: two.gateway.planner.num_waiting_of("globex") == 1)

        async def one_by_one() -> None:
            while True:
                await until(lambda: replica.num_running > 0, seconds=30)
                hold.set()
                await asyncio.sleep(0)
                hold.clear()

        serving = asyncio.create_task(one_by_one())
        try:
            assert (await asyncio.wait_for(short, 30))[0] == 200
            done_before = sum(task.done() for task in flood)
            assert [status for status, _, _ in await asyncio.gather(*flood)] == [200] * 60
        finally:
            serving.cancel()
        assert done_before <= 30


async def test_a_replica_that_fails_everything_costs_the_fleet_no_more_retries_than_its_budget(
    private_redis: RedisServer,
) -> None:
    router: dict[str, Any] = {"retry_share": 0.0, "retry_burst": 4, "retry_jitter_s": 0.0}
    router["default_policy"] = "round_robin"
    async with gateways(private_redis, replicas=2, **router) as both:
        both[0].replicas[0].behaviour = Behaviour(status=500)
        statuses = []
        for i in range(24):
            status, _, _ = await both[i % 2].post("/v1/completions", completion([i + 1] * 20))
            statuses.append(status)
        metrics = [gateway.gateway.metrics for gateway in both]
        retries = sum(
            sample.value
            for of_one in metrics
            for metric in of_one.retries.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
    assert 1 <= retries <= 4
    assert 502 in statuses
