"""A gateway over one replica with two engine cores: placed by rank, predicted as realised."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvindex.index import Target
from tests.conditions import until
from tests.redis_server import RedisServer
from tests.router.fake_replica import TOKEN
from tests.router.running_gateway import Running, completion, running_gateway
from tests.router.test_gateway_redis import SECRET, RedisStores
from tests.worker.server.replica_process import ReplicaProcess, started_replica

NUM_PROMPTS = 4
BOTH = {Target("r0", 0), Target("r0", 1)}


@asynccontextmanager
async def gateway_over_two_ranks(
    server: RedisServer, folder: Path
) -> AsyncIterator[tuple[Running, RedisStores, ReplicaProcess]]:
    stores = RedisStores(server.url)
    async with (
        started_replica(
            folder,
            index_url=server.url,
            fleet_secret=SECRET.decode(),
            internal_token=TOKEN,
            data_parallel_size=2,
        ) as replica,
        running_gateway(stores=stores, replicas=0) as running,
    ):
        await until(lambda: running.gateway.view.mode == "EXACT")
        await until(lambda: exact_targets(stores, 2))
        yield running, stores, replica
    await stores.close()


async def exact_targets(stores: RedisStores, number: int) -> bool:
    """Whether the index has so many live targets, all EXACT."""
    states = await stores.replica_index.states()
    return len(states) == number and {state.report.mode for state in states} == {"EXACT"}


async def num_blocks(stores: RedisStores) -> dict[Target, int]:
    """Blocks in the index by target."""
    states = await stores.replica_index.states()
    return {state.target: sum(state.num_blocks.values()) for state in states}


async def ask(running: Running, prompt: int) -> tuple[int, int]:
    """Complete a 40-token prompt: its predicted and its realised cached tokens."""
    body = completion([prompt] * 40, max_tokens=4, ignore_eos=True)
    status, answer, headers = await running.post("/v1/completions", body)
    assert status == 200, answer
    predicted = int(headers["x-prefixfleet-cached-tokens-predicted"])
    return predicted, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_requests_go_to_the_rank_that_holds_their_prefix(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with gateway_over_two_ranks(private_redis, tmp_path) as (running, stores, replica):
        prompts = range(1, NUM_PROMPTS + 1)
        first = await asyncio.gather(*(ask(running, prompt) for prompt in prompts))
        assert first == [(0, 0)] * NUM_PROMPTS

        async def all_are_told() -> bool:
            held = await num_blocks(stores)
            return sum(held.values()) == 2 * NUM_PROMPTS and set(held) == BOTH

        await until(all_are_told)
        assert 0 not in (await num_blocks(stores)).values(), "one rank got everything"
        for _ in range(2):
            for prompt in prompts:
                assert await ask(running, prompt) == (32, 32)
        for name in ("prompt_tokens_total", "prefix_cache_hits_total"):
            both = [await rank_metric(replica, f"vllm:{name}", rank) for rank in (0, 1)]
            assert sum(both) == NUM_PROMPTS * (120 if "prompt" in name else 64)
            assert min(both) > 0


async def rank_metric(replica: ReplicaProcess, name: str, rank: int) -> float:
    """Read one rank's sample of a metric."""
    async with replica.session.get(replica.url + "/metrics", headers=replica.headers) as response:
        lines = (await response.text()).splitlines()
    label = f'engine="{rank}"'
    return float(next(x.split()[-1] for x in lines if x.startswith(name + "{") and label in x))


@pytest.mark.slow
async def test_a_rank_that_dies_leaves_the_index_the_other_serves_and_it_comes_back(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with gateway_over_two_ranks(private_redis, tmp_path) as (running, stores, replica):
        os.kill(replica.core_pids()[-1], signal.SIGKILL)
        await until(lambda: exact_targets(stores, 1))
        await replica.wait_health(status="degraded")
        (record,) = await stores.replica_registry.records()
        assert (record.id, record.dp_size) == ("r0", 2)
        assert await ask(running, 1) == (0, 0)
        await until(lambda: exact_targets(stores, 2))
        await replica.wait_health(status="ready", reason=None)
        assert await replica.stop() == 0
        assert await stores.replica_index.states() == []
        assert await stores.replica_registry.records() == []


@pytest.mark.slow
async def test_every_rank_has_a_snapshot_and_all_are_rebuilt_together(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with gateway_over_two_ranks(private_redis, tmp_path) as (running, _, replica):
        await asyncio.gather(*(ask(running, prompt) for prompt in range(1, NUM_PROMPTS + 1)))
        sizes = []
        for rank in (0, 1):
            url = f"{replica.url}/kv/snapshot?format=json&rank={rank}"
            async with replica.session.get(url, headers=replica.headers) as response:
                snapshot = await response.json()
            assert snapshot["dp_rank"] == rank
            sizes.append(len(snapshot["entries"]))
        assert sum(sizes) == 2 * NUM_PROMPTS
        status, answer = await replica.post("/kv/rebuild", {})
        assert (status, answer["num_blocks"]) == (200, 2 * NUM_PROMPTS)
        assert [rank["num_blocks"] for rank in answer["ranks"]] == sizes
        url = f"{replica.url}/kv/snapshot?rank=2"
        async with replica.session.get(url, headers=replica.headers) as response:
            assert response.status == 400
        assert await replica.post("/reset_prefix_cache", {}) == (200, {"success": True})
