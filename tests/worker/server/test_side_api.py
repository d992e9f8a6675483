"""A replica's other endpoints, its health, and the pool that encodes off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from engine.frontend.errors import RequestError
from engine.frontend.tokenizer_bundle import TokenizerBundle
from engine.messages import PoolSnapshot, SnapshotEntry
from kvindex.foundation.clock import SystemClock
from kvindex.hashing import HashScheme, hash_tokens
from kvindex.index import IndexOp
from tests.engine.frontend.tiny_tokenizer import BOS_ID, IM_START_ID, tiny_bundle
from tests.worker.server.replica import (
    NUM_BLOCKS,
    RunningReplica,
    replica_spec,
    running_replica,
    served,
    until,
)
from worker.server.encode_pool import EncodePool
from worker.server.front import ReplicaFront
from worker.server.registration import snapshot_data

PROMPT = list(range(40))
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
async def replica() -> AsyncIterator[RunningReplica]:
    async with running_replica() as running:
        yield running


async def scrape(replica: RunningReplica) -> dict[str, float]:
    async with replica.session.get(replica.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = (await response.text()).splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


async def test_metrics_have_vllms_names_and_meaning(replica: RunningReplica) -> None:
    for _ in range(2):
        await replica.post("/v1/completions", BODY)
    found = await scrape(replica)
    labels = '{engine="0",model_name="tiny"}'
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:prompt_tokens_total": 80,
        "vllm:generation_tokens_total": 6,
        "vllm:num_preemptions_total": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "prefixfleet_engine_kv_blocks": NUM_BLOCKS - 1,
        "prefixfleet_engine_cached_blocks": 2,
    }
    assert {name: found[name + labels] for name in expected} == expected
    finished = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
    assert found[finished] == 2


async def test_the_model_is_named_to_routers_that_ask_for_it(replica: RunningReplica) -> None:
    assert await replica.get("/model_info") == (200, {"model_path": "tiny"})


async def test_a_snapshot_lists_the_cached_blocks_in_both_forms(replica: RunningReplica) -> None:
    await replica.post("/v1/completions", BODY)
    async with replica.session.get(replica.url + "/kv/snapshot") as response:
        assert response.content_type == "application/msgpack"
        snapshot = msgspec.msgpack.decode(await response.read(), type=PoolSnapshot)
    expected = hash_tokens(PROMPT, HashScheme())
    assert {entry.block_hash for entry in snapshot.entries} == set(expected)
    status, as_json = await replica.get("/kv/snapshot?format=json")
    assert status == 200
    assert msgspec.convert(as_json, PoolSnapshot, strict=False) == snapshot
    assert (await replica.get("/kv/snapshot?format=xml"))[0] == 400


async def test_a_replica_on_its_own_has_no_index_to_rebuild(replica: RunningReplica) -> None:
    status, body = await replica.post("/kv/rebuild", b"")
    assert status == 404
    assert body["error"]["message"] == "this replica is in no fleet: it has no index to rebuild"


def test_a_snapshot_becomes_one_operation_per_group_and_tier() -> None:
    entries = [
        SnapshotEntry(b"a"),
        SnapshotEntry(b"b", tier="host"),
        SnapshotEntry(b"c"),
        SnapshotEntry(b"d", group=1),
    ]
    data = snapshot_data(PoolSnapshot(boot_ns=5, seq=7, entries=entries))
    assert (data.boot_ns, data.seq) == (5, 7)
    assert list(data.ops) == [
        IndexOp(kind="stored", hashes=(b"a", b"c")),
        IndexOp(kind="stored", hashes=(b"b",), tier="host"),
        IndexOp(kind="stored", hashes=(b"d",), group=1),
    ]


async def test_a_reset_forgets_the_cache(replica: RunningReplica) -> None:
    await replica.post("/v1/completions", BODY)
    assert await replica.post("/reset_prefix_cache", b"") == (200, {"success": True})
    _, answer = await replica.post("/v1/completions", BODY)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.fault("engine-30")
async def test_a_reset_fails_visibly_while_a_request_runs_and_loses_no_token_when_forced() -> None:
    body = BODY | {"max_tokens": 40, "temperature": 0}
    async with running_replica(step_s=0.01) as replica:
        _, undisturbed = await replica.post("/v1/completions", body)
        running = asyncio.create_task(replica.post("/v1/completions", body))
        await until(lambda: len(replica.core.scheduler.running) == 1)
        assert await replica.post("/reset_prefix_cache", b"") == (200, {"success": False})
        forced = "/reset_prefix_cache?reset_running_requests=true"
        assert await replica.post(forced, b"") == (200, {"success": True})
        assert not running.done()
        _, disturbed = await running
    assert disturbed["choices"][0] == undisturbed["choices"][0]


async def test_the_tokenizer_is_handed_out_under_its_digest(replica: RunningReplica) -> None:
    async with replica.session.get(replica.url + "/tokenizer") as response:
        bundle = msgspec.msgpack.decode(await response.read(), type=TokenizerBundle)
        assert response.headers["ETag"] == f'"{tiny_bundle().digest}"'
    assert bundle == tiny_bundle()


async def test_texts_and_conversations_are_tokenized_as_generation_would(
    replica: RunningReplica,
) -> None:
    _, text = await replica.post("/tokenize", {"prompt": "the", "return_token_strs": True})
    assert text["tokens"][0] == BOS_ID
    assert (text["count"], text["max_model_len"]) == (2, 512)
    assert text["token_strs"] == ["<bos>", "the"]
    messages = [{"role": "user", "content": "hi"}]
    _, chat = await replica.post("/tokenize", {"messages": messages})
    assert chat["tokens"][:2] == [BOS_ID, IM_START_ID]
    _, answer = await replica.post(
        "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 1}
    )
    assert answer["usage"]["prompt_tokens"] == chat["count"]
    _, back = await replica.post("/detokenize", {"tokens": chat["tokens"]})
    assert back == {"prompt": "<bos><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


async def test_health_follows_the_life_of_the_replica() -> None:
    front = ReplicaFront(replica_spec(), tiny_bundle(), SystemClock())
    async with served(front) as url, running_replica() as other:

        async def seen(path: str) -> tuple[int, Any]:
            async with other.session.get(url + path) as response:
                return response.status, await response.json()

        assert await seen("/health") == (
            503,
            {"status": "starting", "reason": "the engine is loading", "mode": "FALLBACK"},
        )
        status, answer = await seen("/v1/models")
        assert (status, answer["error"]["code"]) == (503, "starting")
        front.become_ready(other.client, other.front.prompts)
        assert await seen("/health") == (
            200,
            {"status": "ready", "reason": None, "mode": "FALLBACK"},
        )
        front.become_draining()
        assert (await seen("/health"))[1]["status"] == "draining"
        async with other.session.post(url + "/v1/completions", json=BODY) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "draining"
        front.become_dead("it burnt")
        assert await seen("/health") == (
            503,
            {"status": "dead", "reason": "it burnt", "mode": "FALLBACK"},
        )
        assert (await seen("/v1/models"))[1]["error"]["code"] == "engine_dead"
    front.pool.close()


async def test_encoding_never_runs_on_the_event_loops_thread(replica: RunningReplica) -> None:
    encoder = replica.front.prompts.encoder
    threads: set[str] = set()
    encode = encoder.encode

    def traced(*args: Any, **options: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(*args, **options)

    encoder.encode = traced  # type: ignore[method-assign]
    messages = [{"role": "user", "content": "the"}]
    await replica.post("/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 1})
    await replica.post(
        "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 1}
    )
    await replica.post("/tokenize", {"prompt": "the"})
    assert threads
    assert all(name.startswith("encode") for name in threads)


async def test_the_pool_refuses_what_would_wait_too_long_and_recovers() -> None:
    pool = EncodePool(num_threads=1, max_pending=2)
    gate = threading.Event()
    waiting = [asyncio.create_task(pool.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        await pool.run(gate.wait)
    assert (caught.value.kind, caught.value.retry_after_s) == ("overloaded", 1.0)
    waiting[1].cancel()
    gate.set()
    assert await waiting[0]
    await asyncio.gather(waiting[1], return_exceptions=True)
    assert await pool.run(lambda: 7) == 7
    pool.close()


async def test_metrics_tell_how_long_blocks_wait_for_their_next_use(
    replica: RunningReplica,
) -> None:
    body = BODY | {"prompt": [i % 250 for i in range(400)]}
    for _ in range(2):
        await replica.post("/v1/completions", body)
    found = await scrape(replica)
    labels = 'engine="0",model_name="tiny"'
    bucket = 'vllm:kv_block_reuse_gap_seconds_bucket{engine="0",le="+Inf",model_name="tiny"}'
    assert found[bucket] == found[f"vllm:kv_block_reuse_gap_seconds_count{{{labels}}}"] > 0


async def test_metrics_tell_tenants_apart() -> None:
    async with running_replica(internal_token="t") as replica:
        token = {"Authorization": "Bearer t"}
        body = BODY | {"prefixfleet": {"request_id": "x", "tenant": "acme"}}
        assert (await replica.post("/v1/completions", body, **token))[0] == 200
        async with replica.session.get(replica.url + "/metrics", headers=token) as response:
            lines = (await response.text()).splitlines()
    labels = '{model_name="tiny",tenant="acme"}'
    assert f"prefixfleet_engine_tenant_prompt_tokens_total{labels} 40.0" in lines
    assert f"prefixfleet_engine_tenant_generation_tokens_total{labels} 3.0" in lines
    assert f"prefixfleet_engine_tenant_held_blocks{labels} 0.0" in lines


async def test_a_paused_replica_lets_requests_wait_and_loses_none(
    replica: RunningReplica,
) -> None:
    async with replica.session.post(replica.url + "/pause") as response:
        assert (response.status, await response.json()) == (200, {"paused": True})
    waiting = asyncio.create_task(replica.post("/v1/completions", BODY))
    await until(lambda: replica.front.client.stats.num_waiting == 1)
    async with replica.session.get(replica.url + "/is_paused") as response:
        assert await response.json() == {"is_paused": True}
    assert not waiting.done()
    async with replica.session.post(replica.url + "/resume") as response:
        assert await response.json() == {"paused": False}
    status, answer = await waiting
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


async def test_an_unknown_way_to_pause_is_refused(replica: RunningReplica) -> None:
    async with replica.session.post(replica.url + "/pause?mode=now") as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "mode")
