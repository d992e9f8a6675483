"""Two gateways, three replicas, tenants with limits, and everything that can die does.

No stream is lost that its own gateway's death did not cut, each equals the undisturbed run token
for token, limits hold over both gateways, and at the end nothing is counted as running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from router.config import GatewaySpec
from tests import conditions
from tests.chaos.limited import greedy_tenant
from tests.chaos.load import steady_load
from tests.chaos.test_fleet_under_load import (
    NUM_CLIENTS,
    all_exact,
    back,
    fleet_config,
    flows,
    keys,
    nothing_runs,
    pid_of,
    replicas,
    tree,
    until,
)
from tests.e2e.fleet_process import REPOSITORY, FleetProcess, answers, http
from tests.redis_server import RedisServer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PER_MINUTE = 30
TENANTS = ("acme", "globex", "initech", "hooli")


class Second(NamedTuple):
    """A gateway beside that of the fleet, over the same Redis."""

    url: str
    process: subprocess.Popen[bytes]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis that finds its data again."""
    with tempfile.TemporaryDirectory(prefix="pf-chaos-") as folder:
        server = RedisServer(Path(folder), persistent=True)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def fleet(tmp_path: Path, redis: RedisServer) -> Iterator[FleetProcess]:
    config = fleet_config(tmp_path)
    limits = {"requests_per_minute": PER_MINUTE}
    config["tenants"] += [
        {"name": "initech", "limits": limits},
        {"name": "hooli", "limits": limits},
    ]
    running = FleetProcess(tmp_path, config, "--redis", redis.url).start()
    yield running
    running.kill()


@pytest.fixture
def second(fleet: FleetProcess, tmp_path: Path) -> Iterator[Second]:
    """Start another gateway with the settings of the first one, on ports of its own."""
    first = msgspec.json.decode(
        (fleet.run_dir / "specs/gateway.json").read_bytes(), type=GatewaySpec
    )
    port = free_port()
    router = msgspec.structs.replace(first.router, port=port, admin_port=free_port())
    spec = msgspec.structs.replace(
        first, router=router, cache_dir=str(tmp_path / "second"), source=None
    )
    file = tmp_path / "second.json"
    file.write_bytes(msgspec.json.encode(spec))
    with (tmp_path / "second.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "router.gateway", "--config-json", str(file)],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
    yield Second(f"http://127.0.0.1:{port}", process)
    process.kill()
    process.wait()


async def test_streams_and_limits_survive_everything_at_once(
    fleet: FleetProcess, second: Second, redis: RedisServer
) -> None:
    await until(lambda: answers(f"{second.url}/ready"), "the second gateway is ready")
    urls = [fleet.file.url, second.url]
    async with (
        steady_load(urls[0], keys(fleet), num_clients=NUM_CLIENTS, other_url=urls[1]) as load,
        greedy_tenant(urls, fleet.key("initech")) as initech,
    ):
        await flows(load)
        replica_id, pid = pid_of(fleet, 0)
        epoch = replicas(fleet)[replica_id]["epoch"]
        os.kill(pid, signal.SIGKILL)
        await back(fleet, replica_id, epoch)
        await flows(load)
        await refused_everywhere(urls, initech)
        admitted = sum(initech[url, 200] for url in urls)
        assert PER_MINUTE <= admitted <= PER_MINUTE + 1, initech
        assert set(initech) == {(url, status) for url in urls for status in (200, 429)}

        _, hung = pid_of(fleet, 1)
        stopped = tree(hung)
        for one in stopped:
            os.kill(one, signal.SIGSTOP)
        await flows(load, 2 * NUM_CLIENTS)
        for one in stopped:
            os.kill(one, signal.SIGCONT)
        await until(lambda: all_exact(fleet), "the hung replica is back")
        assert (load.wrong, load.num_hung_up) == ([], 0)

    async with steady_load(
        urls[0], keys(fleet), num_clients=NUM_CLIENTS, other_url=urls[1]
    ) as load:
        redis.kill()
        await flows(load)
        async with greedy_tenant(urls, fleet.key("hooli")) as hooli:
            await refused_everywhere(urls, hooli)
            await flows(load)
        # Without the store each gateway gives its own half, to one request more at most.
        for url in urls:
            assert hooli[url, 200] <= PER_MINUTE // 2 + 1, hooli
        redis.start()
        await until(lambda: all_exact(fleet), "the index is whole again")

        drained, pid = pid_of(fleet, 2)
        epoch = replicas(fleet)[drained]["epoch"]
        os.kill(pid, signal.SIGTERM)
        await back(fleet, drained, epoch)
        await flows(load)
        assert (load.wrong, load.num_hung_up) == ([], 0)

        second.process.kill()
        await flows(load, 2 * NUM_CLIENTS)
    assert load.wrong == []
    # Only clients of the gateway that was killed saw an error, each of them at most one.
    assert 0 < load.num_hung_up <= NUM_CLIENTS // 2
    await nothing_runs(fleet)
    await nothing_is_reserved(fleet, redis)


async def refused_everywhere(urls: list[str], answers: Counter[tuple[str, int]]) -> None:
    """Wait until each gateway has refused the tenant, so that it has had all it can get."""
    await until(lambda: all(answers[url, 429] for url in urls), "both gateways refuse")


async def nothing_is_reserved(fleet: FleetProcess, redis: RedisServer) -> None:
    """Wait until what both gateways share is at zero; what the dead one had lapses with its lease.

    That is the load of each replica in the index, and the running requests of each tenant.
    """
    (pool,) = {state["pool"] for state in replicas(fleet).values()}
    index = RedisIndex(connect(redis.url), pool)
    try:
        await conditions.until(lambda: is_free(index), seconds=40)
    finally:
        await index.close()
    await until(lambda: not any(running_of(fleet, t) for t in TENANTS), "no tenant runs anything")


def running_of(fleet: FleetProcess, tenant: str) -> int:
    usage = http(f"{fleet.file.url}/v1/usage", key=fleet.key(tenant)).body
    return sum(limit["running"] for limit in usage["limits"])


async def is_free(index: RedisIndex) -> bool:
    loads = [(m.num_reserved, m.reserved_prefill_tokens) for m in await index.match([])]
    return loads == [(0, 0)] * 3
