"""Several cores as one: who gets what, and what is summed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.core import EngineCore
from engine.frontend.errors import RequestError
from engine.scripted_executor import ScriptedExecutor
from kvindex.foundation.clock import SystemClock
from tests.conditions import until
from tests.engine.build import make_request
from tests.worker.core.build import CONFIG
from worker.core.client import EngineClient
from worker.core.data_parallel import DataParallelClient
from worker.core.inproc_client import AsyncInprocClient


async def start_core(_: int) -> EngineClient:
    executor, clock = ScriptedExecutor(num_blocks=64, block_size=4), SystemClock()
    return await AsyncInprocClient.start(EngineCore(CONFIG, executor, clock), clock)


@pytest.fixture
async def client() -> AsyncIterator[DataParallelClient]:
    made = await DataParallelClient.start(3, start_core, max_step_tokens=64)
    yield made
    await made.close()


async def run(client: EngineClient, request_id: str, *, dp_rank: int | None = None) -> None:
    request = make_request(request_id, range(9), tenant="acme")
    async for _ in client.generate(request, dp_rank=dp_rank):
        pass


def prompts_by_rank(client: EngineClient) -> list[int]:
    return [core.stats.prompt_tokens_total for core in client.ranks]


async def test_a_named_rank_serves_what_names_it(client: DataParallelClient) -> None:
    await asyncio.gather(*(run(client, f"r{i}", dp_rank=1) for i in range(4)))
    assert prompts_by_rank(client) == [0, 36, 0]


async def test_requests_without_a_rank_are_spread(client: DataParallelClient) -> None:
    await asyncio.gather(*(run(client, f"r{i}") for i in range(6)))
    assert prompts_by_rank(client) == [18, 18, 18]


async def test_a_rank_that_does_not_exist_is_refused(client: DataParallelClient) -> None:
    with pytest.raises(RequestError, match="there is no rank 3; ranks are below 3") as caught:
        await run(client, "a", dp_rank=3)
    assert caught.value.kind == "invalid_request"


async def test_statistics_are_sums_and_snapshots_are_by_rank(client: DataParallelClient) -> None:
    for rank in (0, 2):
        await run(client, f"r{rank}", dp_rank=rank)
    assert client.stats.prompt_tokens_total == 18
    assert client.stats.num_blocks == 3 * 63
    assert (await client.tenant_stats())["acme"].prompt_tokens_total == 18
    assert [len(snapshot.entries) for snapshot in await client.snapshots()] == [3, 0, 3]


async def test_a_reset_fails_where_requests_hold_blocks_and_works_elsewhere(
    client: DataParallelClient,
) -> None:
    await run(client, "done", dp_rank=0)
    held = client.generate(make_request("held", range(9), max_tokens=100), dp_rank=1)
    await anext(held)
    assert not await client.reset_prefix_cache(preempt_running=False)
    assert [bool(s.entries) for s in await client.snapshots()] == [False, True, False]
    assert await client.reset_prefix_cache(preempt_running=True)


async def test_sleep_and_other_weights_reach_every_core(client: DataParallelClient) -> None:
    before = client.info.execution_digest
    await client.sleep(1)
    assert (client.stats.sleep_level, [c.stats.sleep_level for c in client.ranks]) == (1, [1] * 3)
    await client.wake_up()
    assert client.stats.sleep_level is None
    await client.update_weights("/models/next")
    assert len({core.info.execution_digest for core in client.ranks} | {before}) == 2


async def test_a_core_that_is_started_again_is_like_the_others(client: DataParallelClient) -> None:
    await client.update_weights("/models/next")
    await client.sleep(2)
    dead = client.ranks[1]
    await dead.close()
    await until(lambda: client.ranks[1] is not dead)
    assert client.ranks[1].info.execution_digest == client.ranks[0].info.execution_digest
    assert client.ranks[1].stats.sleep_level == 2
