"""A replica joins its fleet, stays in it over trouble and leaves it: real Redis and processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from kvindex.hashing import hash_tokens
from kvindex.index import Target, TargetState
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ModelIdentity, check_record, pool_id
from tests.engine.frontend.tiny_tokenizer import tiny_bundle
from tests.redis_server import RedisServer
from tests.worker.server.replica_process import (
    NUM_BLOCKS,
    ReplicaProcess,
    started_replica,
    until_true,
)

BUNDLE = tiny_bundle()
IDENTITY = ModelIdentity(
    model="tiny",
    tokenizer_digest=BUNDLE.tokenizer_digest,
    template_digest=BUNDLE.template_digest,
)
SCHEME = EngineConfig().hash_scheme
PROMPT = list(range(40))


class Fleet:
    """What a gateway sees: the index of the replica's pool, and the registry."""

    def __init__(self, url: str) -> None:
        self.index = RedisIndex(connect(url), pool_id("tiny", IDENTITY, SCHEME))
        self.registry = RedisRegistry(connect(url), b"secret")

    async def wait_state(self, **report: Any) -> TargetState:
        """Wait until exactly one target is live and its report shows the given fields."""

        async def shows_it() -> bool:
            states = await self.index.states()
            return len(states) == 1 and all(
                getattr(states[0].report, name) == value for name, value in report.items()
            )

        await until_true(shows_it)
        (state,) = await self.index.states()
        return state

    async def wait_record(self) -> None:
        """Wait until the registry has a record."""

        async def is_there() -> bool:
            return len(await self.registry.records()) == 1

        await until_true(is_there)

    async def wait_matched(self, num_blocks: int) -> None:
        """Wait until the index credits the target with that much of PROMPT."""

        async def is_credited() -> bool:
            matches = await self.index.match(hash_tokens(PROMPT, SCHEME))
            return [match.matched_blocks for match in matches] == [num_blocks]

        await until_true(is_credited)

    async def wait_gone(self, *, timeout_s: float) -> None:
        """Wait until no target is live."""

        async def is_empty() -> bool:
            return await self.index.states() == []

        await until_true(is_empty, timeout_s=timeout_s)


@asynccontextmanager
async def fleet_with_replica(
    redis: RedisServer, folder: Path, **changes: Any
) -> AsyncIterator[tuple[Fleet, ReplicaProcess]]:
    fleet = Fleet(redis.url)
    async with started_replica(
        folder, index_url=redis.url, fleet_secret="secret", internal_token="token", **changes
    ) as replica:
        try:
            yield fleet, replica
        finally:
            await fleet.index.close()
            await fleet.registry.close()


async def complete(replica: ReplicaProcess) -> int:
    """Run PROMPT and return its cached tokens."""
    status, answer = await replica.post(
        "/v1/completions",
        {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True},
    )
    assert status == 200
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_a_replica_registers_tells_its_blocks_and_leaves(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with fleet_with_replica(private_redis, tmp_path) as (fleet, replica):
        state = await fleet.wait_state(mode="EXACT")
        assert state.target == Target("r0")
        await fleet.wait_record()
        (record,) = await fleet.registry.records()
        check_record(record, IDENTITY, SCHEME)
        assert (record.url, record.epoch) == (replica.url, state.epoch)
        assert (record.num_blocks, record.max_model_len) == (NUM_BLOCKS - 1, 512)
        assert await complete(replica) == 0
        await fleet.wait_matched(2)
        assert await complete(replica) == 32
        assert await replica.post("/reset_prefix_cache", {}) == (200, {"success": True})
        await fleet.wait_matched(0)
        assert await replica.stop() == 0
        assert await fleet.index.states() == []
        assert await fleet.registry.records() == []


@pytest.mark.slow
async def test_an_emptied_redis_is_filled_again(private_redis: RedisServer, tmp_path: Path) -> None:
    async with fleet_with_replica(private_redis, tmp_path) as (fleet, replica):
        await fleet.wait_state(mode="EXACT")
        await complete(replica)
        await fleet.wait_matched(2)
        private_redis.kill()
        assert await complete(replica) == 32
        private_redis.start()
        await fleet.wait_matched(2)
        await fleet.wait_record()


@pytest.mark.slow
async def test_a_draining_replica_says_so_until_it_leaves(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with fleet_with_replica(private_redis, tmp_path) as (fleet, replica):
        await fleet.wait_state(mode="EXACT", draining=False)
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
        running = asyncio.create_task(replica.post("/v1/completions", body))
        await fleet.wait_state(num_running=1)
        replica.process.send_signal(signal.SIGTERM)
        await fleet.wait_state(draining=True)
        assert (await running)[0] == 200
        assert await replica.process.wait() == 0
        assert await fleet.index.states() == []


@pytest.mark.slow
@pytest.mark.parametrize("hang", [False, True])
async def test_a_replica_whose_core_dies_or_hangs_vanishes_from_the_index(
    private_redis: RedisServer, tmp_path: Path, hang: bool
) -> None:
    async with fleet_with_replica(private_redis, tmp_path) as (fleet, replica):
        await fleet.wait_state(mode="EXACT")
        await complete(replica)
        await fleet.wait_matched(2)
        os.kill(replica.core_pid(), signal.SIGSTOP if hang else signal.SIGKILL)
        await fleet.wait_gone(timeout_s=8)
        if hang:
            found = await replica.health()
            assert found is not None
            assert found[1]["status"] == "unresponsive"
            os.kill(replica.core_pid(), signal.SIGCONT)
            await fleet.wait_matched(2)
