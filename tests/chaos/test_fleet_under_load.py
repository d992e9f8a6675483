"""No stream is lost, cut or changed while replicas are killed, hung, drained and Redis restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.load import Load, steady_load
from tests.e2e.fleet_process import FleetProcess, scripted_config, tiny_folder
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_CLIENTS = 16


async def until(condition: Callable[[], bool], what: str, *, within_s: float = 40.0) -> None:
    """Wait for a condition without holding up the clients."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110  (the state is another process's)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


def fleet_config(folder: Path) -> dict[str, Any]:
    """Return settings of three slow replicas that may die often."""
    config = scripted_config(tiny_folder(folder / "model"), replicas=3)
    config["fleet"]["scripted"]["cost"] = {"base_s": 0.01}
    config["fleet"]["restart_budget"] = 100
    config["router"] |= {"lapse_grace_s": 1.0, "max_attempts": 4}
    return config


@pytest.fixture
def fleet(tmp_path: Path, private_redis: RedisServer) -> Iterator[FleetProcess]:
    config = fleet_config(tmp_path)
    running = FleetProcess(tmp_path, config, "--redis", private_redis.url).start()
    yield running
    running.kill()


def keys(fleet: FleetProcess) -> list[str]:
    return [fleet.key("acme"), fleet.key("globex")]


def replicas(fleet: FleetProcess) -> dict[str, dict[str, Any]]:
    return {r["id"]: r for r in fleet.admin("/admin/replicas").body["replicas"]}


def all_exact(fleet: FleetProcess) -> bool:
    states = replicas(fleet).values()
    return len(states) == 3 and all(r["live"] and r["mode"] == "EXACT" for r in states)


def pid_of(fleet: FleetProcess, number: int) -> tuple[str, int]:
    replica = fleet.file.replicas[number]
    assert replica.pid is not None
    return replica.id, replica.pid


def tree(pid: int) -> list[int]:
    """Return a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(child) for child in children)]


async def flows(load: Load, num_more: int = NUM_CLIENTS) -> None:
    """Wait until so many more answers have come."""
    before = len(load.answers)
    await until(lambda: len(load.answers) >= before + num_more, "traffic flows")


async def back(fleet: FleetProcess, replica_id: str, old_epoch: int) -> None:
    def is_back() -> bool:
        state = replicas(fleet).get(replica_id)
        return state is not None and state["live"] and (state["epoch"] or 0) > old_epoch

    await until(is_back, f"{replica_id} is back")


@pytest.mark.fault("router-45")
async def test_streams_equal_the_undisturbed_run_while_replicas_are_killed(
    fleet: FleetProcess,
) -> None:
    async with steady_load(fleet.file.url, keys(fleet), num_clients=NUM_CLIENTS) as load:
        for number in (0, 1, 2):
            await flows(load)
            replica_id, pid = pid_of(fleet, number)
            epoch = replicas(fleet)[replica_id]["epoch"]
            os.kill(pid, signal.SIGKILL)
            await back(fleet, replica_id, epoch)
            await flows(load)
    assert load.wrong == []
    assert load.num_hung_up == 0
    metrics = await nothing_runs(fleet)
    assert "prefixfleet_resumed_requests_total{" in metrics


async def test_streams_equal_the_undisturbed_run_when_only_the_engine_core_is_killed(
    fleet: FleetProcess,
) -> None:
    async with steady_load(fleet.file.url, keys(fleet), num_clients=NUM_CLIENTS) as load:
        await flows(load)
        replica_id, pid = pid_of(fleet, 0)
        epoch = replicas(fleet)[replica_id]["epoch"]
        for core in tree(pid)[1:]:
            os.kill(core, signal.SIGKILL)
        await back(fleet, replica_id, epoch)
        await flows(load)
    assert (load.wrong, load.num_hung_up) == ([], 0)
    metrics = await nothing_runs(fleet)
    assert "prefixfleet_resumed_requests_total{" in metrics


async def test_streams_equal_the_undisturbed_run_while_a_replica_hangs(
    fleet: FleetProcess,
) -> None:
    async with steady_load(fleet.file.url, keys(fleet), num_clients=NUM_CLIENTS) as load:
        await flows(load)
        _, pid = pid_of(fleet, 0)
        for hung in tree(pid):
            os.kill(hung, signal.SIGSTOP)
        await flows(load, 3 * NUM_CLIENTS)
        for hung in tree(pid):
            os.kill(hung, signal.SIGCONT)
        await until(lambda: all_exact(fleet), "the hung replica is back")
        await flows(load)
    assert load.wrong == []
    await nothing_runs(fleet)


@pytest.mark.fault("router-34")
async def test_streams_equal_the_undisturbed_run_through_restarts_of_everything(
    fleet: FleetProcess, private_redis: RedisServer
) -> None:
    async with steady_load(fleet.file.url, keys(fleet), num_clients=NUM_CLIENTS) as load:
        await flows(load)
        drained, pid = pid_of(fleet, 1)
        epoch = replicas(fleet)[drained]["epoch"]
        os.kill(pid, signal.SIGTERM)
        await back(fleet, drained, epoch)
        await flows(load)
        private_redis.kill()
        await flows(load)
        private_redis.start()
        await until(lambda: all_exact(fleet), "the index is whole again")
        await flows(load)
        assert (load.wrong, load.num_hung_up) == ([], 0)
        gateway = fleet.file.gateway.pid
        assert gateway is not None
        os.kill(gateway, signal.SIGKILL)
        await until(lambda: fleet.file.gateway.pid not in (None, gateway), "a new gateway")
        await flows(load)
    assert load.wrong == []
    assert load.num_hung_up > 0  # Only those saw an error whose gateway was killed.
    await nothing_runs(fleet)


async def nothing_runs(fleet: FleetProcess) -> str:
    """Wait until every count is back at zero; return the gateway's metrics."""

    def is_idle() -> bool:
        return all(r["num_active"] == 0 for r in replicas(fleet).values())

    await until(is_idle, "no replica counts a request")
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{fleet.file.admin_url}/metrics") as reply,
    ):
        metrics = await reply.text()
    assert "prefixfleet_requests_in_flight 0.0" in metrics
    return metrics
