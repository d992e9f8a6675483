"""Replicas of ours behind KV-aware routers of other make: a prefix goes to whoever holds it.

docs/interop.md says what these tests need, and what each router can and cannot see.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.messages import PoolSnapshot
from kvindex.foreign_inventory import ForeignInventory
from kvindex.foreign_stream import ForeignStream
from kvindex.foundation.clock import SystemClock
from kvindex.hashing import HashScheme
from kvindex.subscriber import EventSubscriber
from tests.interop.other_routers import (
    SMG_PYTHON,
    VLLM_ROUTER,
    Worker,
    cached_tokens,
    free_ports,
    running_router,
    smg_command,
    vllm_router_command,
)
from tests.worker.server.replica_process import started_replica, until_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
needs_vllm_router = pytest.mark.skipif(
    not os.environ.get(VLLM_ROUTER), reason=f"{VLLM_ROUTER} names no vllm-router"
)
needs_smg = pytest.mark.skipif(
    not os.environ.get(SMG_PYTHON), reason=f"{SMG_PYTHON} names no interpreter with smg"
)

HIT = 'vllm_router_kv_placement_lookups_total{result="hit"}'
SALTED = 'vllm_router_kv_placement_lookups_total{result="cache_salt"}'


@dataclass
class Fleet:
    """Two replicas of ours that announce what they cache."""

    workers: list[Worker]
    session: aiohttp.ClientSession

    async def ask(self, where: int, body: dict[str, Any]) -> int:
        """Ask a replica past any router."""
        return await cached_tokens(self.session, self.workers[where].url, body)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        workers = []
        for name in ("r0", "r1"):
            events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
            announced = {
                "enable_kv_cache_events": True,
                "endpoint": events,
                "replay_endpoint": replay,
            }
            (tmp_path / name).mkdir()
            replica = await stack.enter_async_context(
                started_replica(
                    tmp_path / name,
                    replica_id=name,
                    kv_events=announced,
                    scripted={"vocab_size": 512, "max_model_len": 2048, "num_blocks": 1024},
                )
            )
            await replica.wait_health(status="ready")
            workers.append(Worker(replica.url, events, replay))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(workers, session)


def text(seed: str) -> str:
    return f"{seed}: " + " ".join(f"{seed}{i}" for i in range(40))


def bodies(seed: str, tail: str) -> list[dict[str, Any]]:
    """Return a prompt of each form: text, token ids, a conversation."""
    tokens = [(ord(seed[-1]) * 7 + i * i) % 200 + 32 for i in range(100)]
    return [
        {"prompt": text(f"{seed}p") + tail},
        {"prompt": [*tokens, *tail.encode()]},
        {"messages": [{"role": "user", "content": text(f"{seed}c") + tail}]},
    ]


@needs_vllm_router
async def test_vllm_routers_kv_aware_sends_a_prefix_to_its_holder(
    fleet: Fleet, tmp_path: Path
) -> None:
    async with running_router(
        vllm_router_command, fleet.workers, tmp_path / "router.log"
    ) as router:
        for where in (0, 1):
            for body in bodies(f"r{where}", ""):
                await fleet.ask(where, body)
        for where in (0, 1):
            seeds = (f"sentinel {where} {i} " for i in itertools.count())

            async def is_seen(where: int = where, seeds: Any = seeds) -> bool:
                """Events come in order: what is found of a later prompt is found of all before."""
                prompt = {"prompt": text(next(seeds))}
                await fleet.ask(where, prompt)
                before = await router.counted(HIT)
                await cached_tokens(router.session, router.url, prompt)
                return await router.counted(HIT) == before + 1

            await until_true(is_seen)
        before = await router.counted(HIT)
        for where in (0, 1):
            for body in bodies(f"r{where}", " and then?"):
                assert await cached_tokens(router.session, router.url, body) >= 64
        assert await router.counted(HIT) == before + 6


@needs_vllm_router
async def test_vllm_router_does_not_look_up_salted_prompts(fleet: Fleet, tmp_path: Path) -> None:
    async with running_router(
        vllm_router_command, fleet.workers, tmp_path / "router.log"
    ) as router:
        turn = {"role": "user", "content": text("salted")}
        body = {"messages": [turn], "cache_salt": "pepper"}
        await cached_tokens(router.session, router.url, body)
        assert await router.counted(SALTED) == 1


@needs_smg
async def test_smg_sends_a_prefix_back_to_where_it_has_sent_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    async with running_router(smg_command, fleet.workers, tmp_path / "router.log") as router:
        for seed in ("one", "two", "three"):
            assert await cached_tokens(router.session, router.url, {"prompt": text(seed)}) == 0
            again = {"prompt": text(seed) + " and then?"}
            assert await cached_tokens(router.session, router.url, again) >= 64


async def test_our_own_bridge_reads_the_stream_as_that_of_a_vllm(fleet: Fleet) -> None:
    for body in bodies("a", ""):
        await fleet.ask(0, body)
    worker = fleet.workers[0]
    async with fleet.session.get(f"{worker.url}/kv_event_sources") as answer:
        source = (await answer.json())["0"]
    assert (source["endpoint"], source["replay_endpoint"]) == (worker.events, worker.replay)
    inventory = ForeignInventory(HashScheme())
    stream = ForeignStream(
        "r0",
        subscriber=EventSubscriber(worker.events, replay_endpoint=worker.replay),
        inventory=inventory,
        clock=SystemClock(),
    )
    try:
        await stream.receive(100)
        assert stream.trust.mode == "EXACT"
        async with fleet.session.get(f"{worker.url}/kv/snapshot") as answer:
            pool = msgspec.msgpack.decode(await answer.read(), type=PoolSnapshot)
        held = {entry.block_hash for entry in pool.entries}
        assert {h for op in (await stream.snapshot()).ops for h in op.hashes} == held
        assert len(held) > 20
    finally:
        await stream.close()
