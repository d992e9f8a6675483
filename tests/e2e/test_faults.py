"""What a fleet does when a part of it dies under traffic."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet_process import FleetProcess, Reply, answers, http, scripted_config, until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

PREFIX = [(11 * i) % 250 for i in range(640)]


def body(seed: int = 0) -> dict[str, object]:
    prompt = [*PREFIX, *((seed + i) % 250 for i in range(32))]
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }


class Traffic:
    """Clients that send one request after the other until told to stop."""

    def __init__(self, fleet: FleetProcess, *, num_clients: int = 4) -> None:
        self.replies: list[Reply] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(fleet, i)) for i in range(num_clients)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self, fleet: FleetProcess, client: int) -> None:
        url, key, sent = fleet.file.url, fleet.key(), 0
        while not self._stop.is_set():
            sent += 1
            try:
                self.replies.append(post(url, key, body(seed=client * 1000 + sent)))
            except OSError as error:
                self.errors.append(str(error))

    @property
    def refused(self) -> list[tuple[int, Any]]:
        """Answers other than 200."""
        return [(reply.status, reply.body) for reply in self.replies if reply.status != 200]


def post(url: str, key: str, content: object) -> Reply:
    return http(f"{url}/v1/completions", key=key, body=content)


def replicas(fleet: FleetProcess) -> dict[str, dict[str, Any]]:
    listed = fleet.admin("/admin/replicas").body["replicas"]
    return {replica["id"]: replica for replica in listed}


def num_blocks(fleet: FleetProcess, replica_id: str) -> int:
    """What the index says, asked of Redis itself."""
    shown = json.loads(fleet.command("index", "status", "--json").stdout)
    rows = [row for row in shown["targets"] if row["target"] == f"{replica_id}/0"]
    return rows[0]["blocks"] if rows else 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FleetProcess]:
    """Two tenants that share their prefixes; the second one's requests go to every replica."""
    config = scripted_config(tiny_model)
    config["tenants"] = [
        {"name": "acme", "isolation": "pair"},
        {"name": "globex", "isolation": "pair", "policy": "round_robin"},
    ]
    running = FleetProcess(tmp_path_factory.mktemp("fleet"), config).start()
    yield running
    running.kill()


@pytest.mark.fault("router-1")
def test_no_request_fails_when_a_replica_is_killed_and_its_old_blocks_count_no_more(
    fleet: FleetProcess,
) -> None:
    victim = replica_of(fleet.post("/v1/completions", body()))
    until(lambda: num_blocks(fleet, victim) >= 40, "the victim's blocks are indexed")
    epoch = replicas(fleet)[victim]["epoch"]
    pid = next(r.pid for r in fleet.file.replicas if r.id == victim)
    assert pid is not None
    with Traffic(fleet) as traffic:
        until(lambda: len(traffic.replies) > 20, "traffic flows")
        os.kill(pid, signal.SIGKILL)
        sent = len(traffic.replies)
        until(lambda: len(traffic.replies) > sent + 20, "traffic goes on")
    assert (traffic.refused, traffic.errors) == ([], [])

    until(lambda: is_back(fleet, victim, epoch), "the victim is back by itself", within_s=30)
    assert num_blocks(fleet, victim) == 0
    unsent = body(seed=200)
    everywhere = [fleet.post("/v1/completions", unsent, tenant="globex") for _ in range(2)]
    tokens = {replica_of(reply): (predicted(reply), cached(reply)) for reply in everywhere}
    other = next(r.id for r in fleet.file.replicas if r.id != victim)
    assert tokens == {victim: (0, 0), other: (640, 640)}


def replica_of(reply: Reply) -> str:
    return reply.headers["x-prefixfleet-replica"].partition("/")[0]


def predicted(reply: Reply) -> int:
    return int(reply.headers["x-prefixfleet-cached-tokens-predicted"])


def cached(reply: Reply) -> int:
    count: int = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def is_back(fleet: FleetProcess, replica_id: str, old_epoch: int) -> bool:
    replica = replicas(fleet).get(replica_id)
    return replica is not None and replica["live"] and (replica["epoch"] or 0) > old_epoch


@pytest.fixture
def fleet_with_redis(
    tmp_path: Path, tiny_model: Path, private_redis: RedisServer
) -> Iterator[FleetProcess]:
    config = scripted_config(tiny_model)
    running = FleetProcess(tmp_path, config, "--redis", private_redis.url).start()
    yield running
    running.kill()


def test_redis_restarted_empty_costs_no_request_and_the_index_is_whole_again(
    fleet_with_redis: FleetProcess, private_redis: RedisServer
) -> None:
    fleet = fleet_with_redis
    warm = fleet.post("/v1/completions", body())
    replica = replica_of(warm)
    until(lambda: num_blocks(fleet, replica) >= 40, "the blocks are indexed")
    with Traffic(fleet) as traffic:
        until(lambda: len(traffic.replies) > 10, "traffic flows")
        private_redis.kill()
        sent = len(traffic.replies)
        until(lambda: len(traffic.replies) > sent + 10, "traffic goes on without Redis")
        private_redis.start()
        started_at = time.monotonic()
        until(lambda: is_whole(fleet, replica), "all EXACT, blocks indexed", within_s=15)
        rebuilt_s = time.monotonic() - started_at
    assert (traffic.refused, traffic.errors) == ([], [])
    assert rebuilt_s < 15
    again = fleet.post("/v1/completions", body())
    assert predicted(again) == cached(again) == 656
    assert again.headers["x-prefixfleet-mode"] == "EXACT"


def is_whole(fleet: FleetProcess, warm: str) -> bool:
    modes = [replica["mode"] for replica in replicas(fleet).values()]
    return modes == ["EXACT", "EXACT"] and num_blocks(fleet, warm) >= 40


def test_the_embedded_redis_comes_back_with_its_data_when_it_is_killed(
    fleet: FleetProcess,
) -> None:
    pid = fleet.file.redis.pid
    assert pid is not None
    fleet.post("/v1/completions", body())
    os.kill(pid, signal.SIGKILL)
    until(lambda: fleet.file.redis.pid not in (None, pid), "a new Redis")
    assert fleet.post("/v1/completions", body()).status == 200
    until(lambda: all(r["mode"] == "EXACT" for r in replicas(fleet).values()), "all EXACT")


def test_the_gateway_comes_back_by_itself_and_knows_at_once_who_holds_what(
    fleet: FleetProcess,
) -> None:
    """Its first decision after a restart is as good as the last one before."""
    unique = {**body(), "prompt": [(13 * i) % 250 for i in range(672)]}
    warm = fleet.post("/v1/completions", unique)
    pid = fleet.file.gateway.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: fleet.file.gateway.pid not in (None, pid), "a new gateway")
    until(lambda: answers(f"{fleet.file.url}/ready"), "it is ready")
    again = fleet.post("/v1/completions", unique)
    assert (predicted(again), cached(again)) == (656, 656)
    assert replica_of(again) == replica_of(warm)
