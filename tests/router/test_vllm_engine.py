"""What a vLLM says of itself over HTTP, as the bridge reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvindex.hashing import Adapter
from kvindex.index import LoadReport, Target
from kvindex.registry import ReplicaRecord
from router.fleet.client import ReplicaClient, ReplicaFailure
from router.fleet.replica import Replica
from router.fleet.vllm_engine import EventEndpoints, VllmEngine
from tests.kvindex.following import record

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="1456",sliding_window="None"} 1.0
process_start_time_seconds 1.79e+09
"""
MODELS = [
    {"id": "m", "root": "/models/m", "parent": None, "max_model_len": 2048},
    {"id": "x", "root": "/adapters/x", "parent": "m"},
]


@asynccontextmanager
async def engine(**answers: Any) -> AsyncIterator[VllmEngine]:
    """Serve documents by path, and a client of them."""
    app = web.Application()
    for path, answer in answers.items():

        async def handler(request: web.Request, answer: Any = answer) -> web.Response:
            if isinstance(answer, str):
                return web.Response(text=answer)
            return web.json_response(answer)

        app.router.add_route("*", "/" + path.replace("__", "/"), handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = ReplicaClient(connect_timeout_s=2.0)
    try:
        port = runner.addresses[0][1]
        yield VllmEngine(f"http://127.0.0.1:{port}", client=client, headers={})
    finally:
        client.close()
        await runner.cleanup()


async def test_models_adapters_and_sizes_are_told_apart() -> None:
    async with engine(v1__models={"data": MODELS}, metrics=METRICS) as vllm:
        facts = await vllm.facts()
    assert (facts.served_models, facts.root, facts.max_model_len) == (("m",), "/models/m", 2048)
    assert facts.adapters == {"x": Adapter("x", "/adapters/x")}
    assert (facts.block_size, facts.num_blocks) == (32, 1456)


@pytest.mark.fault("router-10")
async def test_load_is_told_by_rank() -> None:
    async with engine(metrics=METRICS) as vllm:
        loads = await vllm.loads()
    assert loads == {
        0: LoadReport(num_running=4, num_waiting=7),
        1: LoadReport(num_running=1, kv_usage=0.5),
    }


async def test_an_engine_without_metrics_of_ours_has_no_sizes() -> None:
    async with engine(v1__models={"data": MODELS[:1]}, metrics="# nothing\n") as vllm:
        facts = await vllm.facts()
        assert (facts.block_size, facts.num_blocks) == (None, None)
        assert await vllm.loads() == {}
        assert not await vllm.is_healthy()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"},
            EventEndpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ),
        ({"endpoint": "tcp://10.1.2.3:5557"}, EventEndpoints("tcp://10.1.2.3:5557")),
        ({"endpoint": "tcp://*:5557", "enable_kv_cache_events": False}, None),
    ],
)
async def test_the_event_endpoints_are_made_reachable(
    source: dict[str, Any], expected: EventEndpoints | None
) -> None:
    async with engine(kv_event_sources={"0": source}) as vllm:
        assert await vllm.event_endpoints() == expected


async def test_an_answer_that_makes_no_sense_is_a_failure_with_its_url() -> None:
    async with engine(v1__models={"models": []}) as vllm:
        with pytest.raises(ReplicaFailure, match="/v1/models: "):
            await vllm.facts()


@pytest.mark.fault("router-10")
def test_each_rank_has_ports_of_its_own_and_requests_name_theirs() -> None:
    endpoints = EventEndpoints("tcp://h:5557", "tcp://h:6557")
    assert endpoints.of_rank(0) == endpoints
    assert endpoints.of_rank(3) == EventEndpoints("tcp://h:5560", "tcp://h:6560")
    assert EventEndpoints("ipc:///run/kv").of_rank(0).events == "ipc:///run/kv"
    fields = {name: getattr(record(1), name) for name in ReplicaRecord.__struct_fields__}
    described = ReplicaRecord(**{**fields, "kind": "vllm", "dp_size": 4})
    replica = Replica(id="a", kind="vllm", url="http://h", record=described, token="t")
    assert replica.headers_for(Target("a", 3)) == {
        "authorization": "Bearer t",
        "x-data-parallel-rank": "3",
    }
    assert replica.headers == {"authorization": "Bearer t"}
