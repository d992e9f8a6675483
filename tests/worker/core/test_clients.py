"""Both engine clients, one contract: the same outputs, refusals and endings."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.frontend.errors import RequestError
from engine.messages import EngineOutput, EngineRequest
from engine.scripted_executor import ScriptedExecutor, StepCost
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from kvindex.hashing import hash_tokens
from tests.conditions import until
from tests.engine.build import alone, make_request
from worker.core.client import EngineClient
from worker.core.inproc_client import AsyncInprocClient
from worker.core.process_client import ProcessClient
from worker.core.spec import CoreSpec, ScriptedModel

CONFIG = EngineConfig(block_size=4, check_integrity=True, watermark=0.0)


def spec(**scripted: object) -> CoreSpec:
    model = ScriptedModel(num_blocks=64, **scripted)  # type: ignore[arg-type]
    return CoreSpec(replica_id="r0", engine=CONFIG, scripted=model)


@pytest.fixture(params=["inproc", "process"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineClient]:
    made: AsyncInprocClient | ProcessClient
    if request.param == "inproc":
        executor = ScriptedExecutor(num_blocks=64, block_size=4)
        clock = SystemClock()
        made = await AsyncInprocClient.start(EngineCore(CONFIG, executor, clock), clock)
    else:
        made = await ProcessClient.start(spec(), socket_dir=tmp_path / "sockets")
    yield made
    await made.close()


async def collect(client: EngineClient, request: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(request)]


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
    outputs = client.generate(make_request("a", range(9), max_tokens=200))
    await anext(outputs)
    await outputs.aclose()  # type: ignore[attr-defined]
    await until(lambda: client.stats.num_running == 0)
    assert client.stats.num_free_blocks == client.stats.num_blocks


async def test_a_snapshot_lists_what_can_be_found(client: EngineClient) -> None:
    await collect(client, make_request("a", range(13), max_tokens=1))
    snapshot = await client.snapshot()
    expected = hash_tokens(range(13), CONFIG.hash_scheme)
    assert {entry.block_hash for entry in snapshot.entries} == set(expected)


async def test_a_reset_forgets_everything(client: EngineClient) -> None:
    await collect(client, make_request("a", range(13)))
    assert await client.reset_prefix_cache(preempt_running=False)
    assert (await client.snapshot()).entries == []


async def test_a_closed_client_refuses(client: EngineClient) -> None:
    await client.close()
    with pytest.raises(RequestError) as caught:
        await collect(client, make_request("a", [1]))
    assert caught.value.kind == "engine_dead"


async def test_a_killed_core_ends_its_requests_at_once(tmp_path: Path) -> None:
    slow = spec(cost=StepCost(base_s=0.05))
    client = await ProcessClient.start(slow, socket_dir=tmp_path / "sockets")
    try:
        outputs = client.generate(make_request("a", range(9), max_tokens=200))
        await anext(outputs)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="exit code -9"):
            async for _ in outputs:
                pass
        assert client.dead_reason is not None
    finally:
        await client.close()


async def test_a_core_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = CoreSpec(replica_id="r0", engine=CONFIG, model_folder=str(tmp_path / "none"))
    with pytest.raises(DependencyError, match="ended with exit code 3"):
        await ProcessClient.start(broken, socket_dir=tmp_path / "sockets")
    assert list((tmp_path / "sockets").iterdir()) == []


async def test_closing_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    client = await ProcessClient.start(spec(), socket_dir=tmp_path / "sockets")
    pid = client.pid
    await client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list((tmp_path / "sockets").iterdir()) == []
