"""A replica process with an adapter, its events on: engine, index and registry agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex.hashing import Adapter, hash_tokens
from kvindex.registry import ServedAdapter
from tests.redis_server import RedisServer
from tests.worker.adapter_folders import write_adapter_files
from tests.worker.server.replica_process import until_true
from tests.worker.server.test_registration import PROMPT, SCHEME, fleet_with_replica


@pytest.mark.fault("engine-18")
async def test_the_index_credits_an_adapters_blocks_under_its_own_hashes(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    folder = write_adapter_files(tmp_path / "sql")
    async with fleet_with_replica(private_redis, tmp_path, lora_adapters={"sql": str(folder)}) as (
        fleet,
        replica,
    ):
        await fleet.wait_state(mode="EXACT")
        body = {"model": "sql", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
        status, _ = await replica.post("/v1/completions", body)
        assert status == 200
        chain = hash_tokens(PROMPT, SCHEME, adapter=Adapter("sql", str(folder)))

        async def is_credited() -> bool:
            matches = await fleet.index.match(chain)
            return [match.matched_blocks for match in matches] == [2]

        await until_true(is_credited)
        assert [m.matched_blocks for m in await fleet.index.match(hash_tokens(PROMPT, SCHEME))] == [
            0
        ]
        (record,) = await fleet.registry.records()
        assert record.adapters == (ServedAdapter("sql", str(folder), record.adapters[0].digest),)
        status, answer = await replica.post("/v1/completions", body)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
