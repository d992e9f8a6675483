"""Gateways over a real Redis: shared by two of them, killed, and restarted empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvindex.config import RedisConfig
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from router.assembly import Stores
from tests.conditions import until
from tests.redis_server import RedisServer
from tests.router.fake_replica import FakeReplica
from tests.router.running_gateway import (
    POOL_ID,
    MemoryStores,
    Running,
    chat,
    completion,
    running_gateway,
)

LONG = chat("a long enough prompt to have several blocks in the cache " * 4)
SECRET = b"secret-of-the-fleet"


class RedisStores(MemoryStores):
    """Registry and indexes in a Redis, for gateways and replicas alike."""

    def __init__(self, url: str, config: RedisConfig | None = None) -> None:
        super().__init__()
        self.url = url
        self.config = config
        self.replica_registry = RedisRegistry(connect(url, config), SECRET)
        self.replica_index = RedisIndex(connect(url, config), POOL_ID)

    def for_gateway(self) -> Stores:
        registry = RedisRegistry(connect(self.url, self.config), SECRET)
        return Stores(registry, lambda pool: RedisIndex(connect(self.url, self.config), pool))

    async def register(self, running: Running, replica: FakeReplica) -> None:
        """Register a running replica and wait until the gateway knows it."""
        record = await replica.register(self.replica_registry, self.replica_index)
        await until(lambda: running.knows(record))

    async def close(self) -> None:
        """Close the replicas' connections."""
        await self.replica_index.close()
        await self.replica_registry.close()


@asynccontextmanager
async def over_redis(server: RedisServer) -> AsyncIterator[tuple[RedisStores, Running, Running]]:
    """Run two gateways and two replicas over one server."""
    stores = RedisStores(server.url)
    async with (
        running_gateway(stores=stores, replicas=0) as one,
        running_gateway(stores=stores, replicas=0, id="gw-other") as other,
    ):
        for i in range(2):
            replica = FakeReplica(f"r{i}")
            await replica.start()
            one.replicas.append(replica)
            await stores.register(one, replica)
            await stores.register(other, replica)
        yield stores, one, other
    await stores.close()


async def test_the_second_gateway_knows_what_the_first_has_served(
    private_redis: RedisServer,
) -> None:
    async with over_redis(private_redis) as (_, one, other):
        _, _, first = await one.post("/v1/chat/completions", LONG)
        _, answer, second = await other.post("/v1/chat/completions", LONG)
        assert second["x-prefixfleet-replica"] == first["x-prefixfleet-replica"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert second["x-prefixfleet-cached-tokens-predicted"] == str(cached)
        assert cached > 0


async def test_killing_redis_loses_no_request_and_an_empty_one_is_filled_again(
    private_redis: RedisServer,
) -> None:
    async with over_redis(private_redis) as (stores, one, _):
        statuses: list[int] = []
        modes: list[str] = []

        async def traffic(number: int) -> None:
            for i in range(number):
                status, _, headers = await one.post("/v1/completions", completion(f"{i}"))
                statuses.append(status)
                modes.append(headers["x-prefixfleet-mode"])

        await traffic(5)
        calls = asyncio.create_task(traffic(40))
        private_redis.kill()
        await calls
        assert modes[-1] == "FALLBACK"
        private_redis.start()
        await until(lambda: one.gateway.view.index_is_up)
        await traffic(5)
        for replica in one.replicas:
            await stores.register(one, replica)
        await traffic(5)
        assert set(statuses) == {200}
        assert modes[-1] == "EXACT"
        assert one.num_active() == 0


def index_load(matches: Any) -> int:
    """Return how many requests the index counts."""
    return sum(match.num_reserved for match in matches)


async def test_nothing_stays_reserved_after_traffic_through_both(
    private_redis: RedisServer,
) -> None:
    async with over_redis(private_redis) as (stores, one, other):
        calls = [
            gateway.post("/v1/completions", completion(f"{i}"))
            for i in range(30)
            for gateway in (one, other)
        ]
        answers = await asyncio.gather(*calls)
        assert {status for status, _, _ in answers} == {200}
        left = -1
        async with asyncio.timeout(5):
            while left:
                left = index_load(await stores.replica_index.match([]))
        assert (one.num_active(), other.num_active()) == (0, 0)
