"""The asynchronous engine clients, one contract: the same outputs, refusals and endings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine.core import EngineCore
from engine.frontend.errors import RequestError
from engine.messages import EngineOutput, EngineRequest
from engine.scripted_executor import ScriptedExecutor
from kvindex.foundation.clock import SystemClock
from kvindex.hashing import hash_tokens
from tests.conditions import until
from tests.engine.build import alone, make_request
from tests.worker.core.build import CONFIG, scripted_spec
from worker.core.client import EngineClient
from worker.core.data_parallel import DataParallelClient
from worker.core.inproc_client import AsyncInprocClient
from worker.core.process_client import ProcessClient


async def start_inproc(_: int = 0) -> EngineClient:
    executor = ScriptedExecutor(num_blocks=64, block_size=4)
    clock = SystemClock()
    return await AsyncInprocClient.start(EngineCore(CONFIG, executor, clock), clock)


@pytest.fixture(params=["inproc", "process", "two ranks"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineClient]:
    made: EngineClient
    if request.param == "inproc":
        made = await start_inproc()
    elif request.param == "process":
        made = await ProcessClient.start(scripted_spec(), socket_dir=tmp_path / "sockets")
    else:
        made = await DataParallelClient.start(2, start_inproc, max_step_tokens=64)
    yield made
    await made.close()


async def collect(client: EngineClient, request: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(request, dp_rank=0)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_concurrent_requests_get_their_own_tokens(client: EngineClient) -> None:
    requests = [make_request(f"r{i}", range(i, i + 9), max_tokens=6) for i in range(5)]
    results = await asyncio.gather(*(collect(client, request) for request in requests))
    assert [tokens_of(outputs) for outputs in results] == [alone(r) for r in requests]
    assert all(outputs[-1].finish_reason == "length" for outputs in results)


async def test_cached_tokens_are_told_once(client: EngineClient) -> None:
    await collect(client, make_request("a", range(13)))
    outputs = await collect(client, make_request("b", range(13)))
    told = [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]
    assert told == [12]


async def test_a_refusal_has_a_kind_and_the_next_request_is_served(client: EngineClient) -> None:
    with pytest.raises(RequestError) as caught:
        await collect(client, make_request("long", [1] * 300))
    assert caught.value.kind == "context_length_exceeded"
    assert len(tokens_of(await collect(client, make_request("ok", [1])))) == 4


@pytest.mark.fault("engine-35")
async def test_leaving_a_request_early_aborts_it(client: EngineClient) -> None:
    outputs = client.generate(make_request("a", range(9), max_tokens=200), dp_rank=0)
    await anext(outputs)
    await outputs.aclose()  # type: ignore[attr-defined]
    await until(lambda: client.stats.num_running == 0)
    assert client.stats.num_free_blocks == client.stats.num_blocks


async def test_a_snapshot_lists_what_can_be_found(client: EngineClient) -> None:
    await collect(client, make_request("a", range(13), max_tokens=1))
    snapshot = (await client.snapshots())[0]
    expected = hash_tokens(range(13), CONFIG.hash_scheme)
    assert {entry.block_hash for entry in snapshot.entries} == set(expected)


async def test_a_reset_forgets_everything(client: EngineClient) -> None:
    await collect(client, make_request("a", range(13)))
    assert await client.reset_prefix_cache(preempt_running=False)
    assert [snapshot.entries for snapshot in await client.snapshots()] == [[]] * len(client.ranks)


async def test_a_paused_engine_computes_nothing_until_it_is_resumed(client: EngineClient) -> None:
    await client.pause("all")
    request = make_request("a", range(9))
    running = asyncio.create_task(collect(client, request))
    await until(lambda: client.stats.num_waiting == 1)
    assert client.stats.pause_mode == "all"
    await client.resume()
    assert tokens_of(await running) == alone(request)
    await until(lambda: client.stats.pause_mode is None)


async def test_a_kv_cache_shrinks_and_grows_while_it_serves(client: EngineClient) -> None:
    full = client.info.num_blocks + 1
    assert await client.resize(full // 2) < full
    request = make_request("a", range(20), max_tokens=3)
    assert tokens_of(await collect(client, request)) == alone(request)
    assert await client.resize(10 * full) == full


async def test_each_tenant_has_its_share_of_the_statistics(client: EngineClient) -> None:
    for tenant in ("acme", "globex", None):
        await collect(client, make_request("a", range(9), tenant=tenant))
    stats = await client.tenant_stats()
    assert {name: one.prompt_tokens_total for name, one in stats.items()} == {
        "acme": 9,
        "globex": 9,
        "": 9,
    }


async def test_a_prompt_that_comes_in_parts_has_the_tokens_of_the_whole(
    client: EngineClient,
) -> None:
    whole = make_request("a", range(20))
    opening = msgspec.structs.replace(whole, prompt_token_ids=list(range(7)), prompt_is_open=True)
    running = asyncio.create_task(collect(client, opening))
    await until(lambda: client.stats.num_running + client.stats.num_waiting == 1)
    await client.extend_prompt("a", range(7, 13), is_last=False)
    await client.extend_prompt("a", range(13, 20), is_last=True)
    assert tokens_of(await running) == alone(whole)
    await client.extend_prompt("a", [1], is_last=True)


async def test_a_part_that_is_refused_ends_the_request(client: EngineClient) -> None:
    opening = msgspec.structs.replace(make_request("a", range(9)), prompt_is_open=True)
    running = asyncio.create_task(collect(client, opening))
    await until(lambda: client.stats.num_running + client.stats.num_waiting == 1)
    await client.extend_prompt("a", [1 << 20], is_last=True)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        await running
    await until(lambda: client.stats.num_running + client.stats.num_waiting == 0)
    assert client.stats.num_free_blocks == client.stats.num_blocks


async def test_an_id_that_is_live_is_refused_and_the_first_goes_on(client: EngineClient) -> None:
    request = make_request("a", range(9), max_tokens=40)
    first = client.generate(request, dp_rank=0)
    tokens = list((await anext(first)).token_ids)
    with pytest.raises(RequestError, match="request id a is in use"):
        await collect(client, request)
    async for output in first:
        tokens += output.token_ids
    assert tokens == alone(request)


async def test_a_closed_client_refuses_and_may_be_closed_again(client: EngineClient) -> None:
    await client.close()
    await client.close()
    assert client.dead_reason is not None
    with pytest.raises(RequestError) as caught:
        await collect(client, make_request("a", [1]))
    assert caught.value.kind == "engine_dead"
