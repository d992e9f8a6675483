"""Three gateways on one Redis decide as well as one, and as well right after their restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from kvindex.config import RedisConfig
from tests.conditions import until
from tests.redis_server import RedisServer
from tests.router.fake_replica import FakeReplica
from tests.router.running_gateway import Running, completion, gateway_spec, running_gateway
from tests.router.test_gateway_redis import RedisStores

NUM_REPLICAS = 4
NUM_CHATS = 12
NUM_TURNS = 6
PATIENT = RedisConfig(call_timeout_s=20.0, connect_timeout_s=20.0)
"""Every answer counts, however busy the machine: one that came too late would be FALLBACK."""
TURN_TOKENS = 64
OPENING = [*range(32, 64)] * 2
"""The system prompt that every conversation begins with."""


def prompt(number: int, turn: int) -> list[int]:
    """Return the token ids of a conversation as of a turn; each turn appends to the one before."""
    own = [32 + (number * 7 + i * i + i // 5) % 200 for i in range((turn + 1) * TURN_TOKENS)]
    return [*OPENING, 32 + number, *own]


TRACE = [(number, turn) for turn in range(NUM_TURNS) for number in range(NUM_CHATS)]
"""Turn after turn, so that consecutive requests of a conversation meet different gateways."""


@dataclass
class Fleet:
    """Replicas on one Redis, and the gateways before them at the moment."""

    stores: RedisStores
    replicas: list[FakeReplica]
    gateways: list[Running] = field(default_factory=list)
    num_started: int = 0

    @asynccontextmanager
    async def with_gateways(self, number: int) -> AsyncIterator[None]:
        """Run gateways of new names, as after a restart, which know all replicas."""
        async with AsyncExitStack() as stack:
            for _ in range(number):
                self.num_started += 1
                gateway = running_gateway(
                    gateway_spec(index_timeout_s=20.0),
                    stores=self.stores,
                    replicas=0,
                    id=f"gw-{self.num_started}",
                )
                self.gateways.append(await stack.enter_async_context(gateway))
            for running in self.gateways:
                await until(partial(_knows_all, running, self.replicas))
            yield
        self.gateways.clear()

    async def serve(self, trace: Sequence[tuple[int, int]]) -> list[tuple[str, int, int, int]]:
        """Send requests in turn to the gateways: replica, predicted, realised, prompt tokens."""
        served = []
        for i, (number, turn) in enumerate(trace):
            gateway = self.gateways[i % len(self.gateways)]
            status, answer, headers = await gateway.post(
                "/v1/completions", completion(prompt(number, turn))
            )
            assert status == 200
            served.append(
                (
                    headers["x-prefixfleet-replica"],
                    int(headers["x-prefixfleet-cached-tokens-predicted"]),
                    answer["usage"]["prompt_tokens_details"]["cached_tokens"],
                    answer["usage"]["prompt_tokens"],
                )
            )
        return served


def _knows_all(running: Running, replicas: Sequence[FakeReplica]) -> bool:
    live = {replica.id for replica in running.gateway.view.replicas if replica.live}
    return live == {replica.id for replica in replicas}


@asynccontextmanager
async def fleet(server: RedisServer) -> AsyncIterator[Fleet]:
    stores = RedisStores(server.url, PATIENT)
    replicas = [FakeReplica(f"r{i}") for i in range(NUM_REPLICAS)]
    for replica in replicas:
        await replica.start()
        await replica.register(stores.replica_registry, stores.replica_index)
    try:
        yield Fleet(stores, replicas)
    finally:
        for replica in replicas:
            await replica.leave()
            await replica.stop()
        await stores.close()


def hit_rate(served: Sequence[tuple[str, int, int, int]]) -> float:
    """Return the share of prompt tokens that came from a cache."""
    return sum(row[2] for row in served) / sum(row[3] for row in served)


@pytest.mark.fault("router-8")
async def test_three_gateways_hit_as_often_as_one(private_redis: RedisServer) -> None:
    rates = []
    for number in (1, 3):
        async with fleet(private_redis) as f, f.with_gateways(number):
            served = await f.serve(TRACE)
            assert [row[1] for row in served] == [row[2] for row in served]
            rates.append(hit_rate(served))
    assert rates[0] > 0.6
    assert abs(rates[1] - rates[0]) <= 0.01


@pytest.mark.fault("router-8")
async def test_the_first_decisions_after_a_restart_of_all_gateways_are_as_good(
    private_redis: RedisServer,
) -> None:
    half = NUM_CHATS * NUM_TURNS // 2
    async with fleet(private_redis) as f:
        async with f.with_gateways(3):
            before = await f.serve(TRACE[:half])
        async with f.with_gateways(3):
            after = await f.serve(TRACE[half:])
    last = {number: row[0] for (number, _), row in zip(TRACE, before, strict=False)}
    for (number, turn), row in zip(TRACE[half : half + NUM_CHATS], after, strict=False):
        held = len(prompt(number, turn - 1)) // 16 * 16
        assert row[:3] == (last[number], held, held), f"conversation {number}, turn {turn}"
