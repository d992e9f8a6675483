"""A replica process that sleeps in its fleet: gateways are told, and the index forgets at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer
from tests.worker.server.replica_process import until_true
from tests.worker.server.test_registration import complete, fleet_with_replica


@pytest.mark.fault("engine-29")
async def test_a_sleeping_replica_is_out_of_the_index_and_of_placement(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with fleet_with_replica(private_redis, tmp_path) as (fleet, replica):
        await fleet.wait_state(mode="EXACT", draining=False)
        await complete(replica)
        await fleet.wait_matched(2)
        assert (await replica.post("/sleep?level=2", {}))[0] == 200
        await fleet.wait_state(draining=True)
        await fleet.wait_matched(0)
        assert (await replica.post("/v1/completions", {}))[0] == 503
        assert (await replica.post("/wake_up", {}))[0] == 200
        await fleet.wait_state(mode="EXACT", draining=False)
        assert await complete(replica) == 0
        await fleet.wait_matched(2)


@pytest.mark.fault("engine-29")
async def test_new_weights_are_in_the_registry_when_the_update_is_answered(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with fleet_with_replica(private_redis, tmp_path) as (fleet, replica):
        await fleet.wait_state(mode="EXACT")
        await fleet.wait_record()
        (before,) = await fleet.registry.records()
        await complete(replica)
        await fleet.wait_matched(2)
        body: dict[str, Any] = {"path": str(tmp_path / "model")}
        status, answer = await replica.post("/update_weights", body)
        assert status == 200
        (after,) = await fleet.registry.records()
        assert after.execution_digest == answer["execution_digest"] != before.execution_digest
        await fleet.wait_matched(0)
        await fleet.wait_state(mode="EXACT", draining=False)
        assert await complete(replica) == 0


@pytest.mark.slow
async def test_every_core_of_a_data_parallel_replica_sleeps(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    async with fleet_with_replica(private_redis, tmp_path, data_parallel_size=2) as (_, replica):
        await replica.wait_health(status="ready", mode="EXACT")
        await replica.post("/sleep", {})
        name = "vllm:engine_sleep_state"
        async with replica.session.get(
            replica.url + "/metrics", headers=replica.headers
        ) as response:
            lines = (await response.text()).splitlines()
        levels = [line.split()[-1] for line in lines if line.startswith(name + "{")]
        assert levels == ["1.0", "1.0"]
        await replica.post("/wake_up", {})

        async def is_awake() -> bool:
            found = await replica.health()
            return found is not None and found[0] == 200

        await until_true(is_awake)
