"""Replicas as actors of a Ray cluster on this machine: served from, killed, restarted, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.launch.down import is_alive
from router.launch.run_dir import RunDirectory
from router.launch.secrets import FleetSecrets, load_secrets
from tests.e2e.fleet_process import FleetProcess, scripted_config, until, with_descendants
from tests.e2e.test_faults import Traffic, body, cached, is_back, predicted, replica_of, replicas
from tests.redis_server import RedisServer

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_CPUS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Path]:
    """A cluster of one node, which every process of these tests joins; yields its folder."""
    # In a folder of its own it does not become the cluster that others on this machine find first.
    with (
        pytest.MonkeyPatch.context() as environ,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
    ):
        environ.delenv("RAY_ADDRESS", raising=False)
        environ.setenv("RAY_AUTH_MODE", "disabled")  # a token would be written to the home folder
        context = ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=80 << 20,
            _temp_dir=folder,
        )
        environ.setenv("RAY_ADDRESS", context.address_info["gcs_address"])
        yield Path(folder)
        ray.shutdown()


def ray_config(model: Path, **fleet: object) -> dict[str, Any]:
    config = scripted_config(model, launcher="ray", **fleet)
    config["worker"]["num_threads"] = 1
    return config


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FleetProcess]:
    """Three replicas on the cluster; the second tenant's requests go to every one of them."""
    config = ray_config(tiny_model, replicas=3)
    config["tenants"] = [
        {"name": "acme", "isolation": "pair"},
        {"name": "globex", "isolation": "pair", "policy": "round_robin"},
    ]
    running = FleetProcess(tmp_path_factory.mktemp("fleet"), config).start()
    yield running
    running.kill()


def actors() -> dict[str, Any]:
    """The living replicas' actors, by the name of the replica."""
    return {
        one["name"]: ray.get_actor(one["name"], namespace=one["namespace"])
        for one in ray.util.list_named_actors(all_namespaces=True)
    }


def place(fleet: FleetProcess, replica_id: str) -> tuple[str, int]:
    """URL and process id of a replica, as its log has them last."""
    log = (fleet.run_dir / "logs" / f"{replica_id}.log").read_text()
    line = [line for line in log.splitlines() if " runs on node " in line][-1]
    where, _, url = line.rpartition(", ")
    return url, int(where.rpartition(" ")[2])


def test_every_replica_is_an_actor_and_the_fleet_serves_from_all_of_them(
    fleet: FleetProcess,
) -> None:
    assert set(actors()) == {"replica-0", "replica-1", "replica-2"}
    answers = [fleet.post("/v1/completions", body(), tenant="globex") for _ in range(3)]
    assert {replica_of(reply) for reply in answers} == set(actors())
    assert {(replica.id, replica.url) for replica in fleet.file.replicas} == {
        (name, place(fleet, name)[0]) for name in actors()
    }
    again = fleet.post("/v1/completions", body())
    assert (predicted(again), cached(again)) == (656, 656)
    assert again.headers["x-prefixfleet-mode"] == "EXACT"
    assert fleet.command("status").returncode == 0


def test_no_request_fails_when_an_actor_is_killed_and_it_comes_back_under_a_new_epoch(
    fleet: FleetProcess,
) -> None:
    victim = replica_of(fleet.post("/v1/completions", body()))
    epoch = replicas(fleet)[victim]["epoch"]
    _, pid = place(fleet, victim)
    processes = with_descendants({pid})
    with Traffic(fleet) as traffic:
        until(lambda: len(traffic.replies) > 20, "traffic flows")
        ray.kill(actors()[victim])
        sent = len(traffic.replies)
        until(lambda: len(traffic.replies) > sent + 20, "traffic goes on")
        until(lambda: is_back(fleet, victim, epoch), "it is back by itself", within_s=60)
    assert (traffic.refused, traffic.errors) == ([], [])
    assert not [pid for pid in processes if is_alive(pid)]
    assert f"{victim} has lost its actor: " in fleet.command("logs", victim, "--lines=9999").stdout
    until(lambda: fleet.command("status").returncode == 0, "the fleet file has its new place")


def test_the_process_of_a_replica_is_killed_and_the_supervisor_says_how_it_ended(
    fleet: FleetProcess,
) -> None:
    epoch = replicas(fleet)["replica-1"]["epoch"]
    os.kill(place(fleet, "replica-1")[1], signal.SIGKILL)
    until(lambda: is_back(fleet, "replica-1", epoch), "it is back by itself", within_s=60)
    assert "replica-1 ended with exit code 137; restart " in fleet.output
    assert "replica-1 was killed by SIGKILL" in fleet.command("logs", "replica-1").stdout


def test_no_secret_is_in_rays_logs_or_in_what_every_user_sees_of_a_process(
    fleet: FleetProcess, cluster: Path
) -> None:
    secrets = load_secrets(RunDirectory(fleet.run_dir))
    assert len(FleetSecrets.__struct_fields__) == 3
    wanted = [getattr(secrets, name).encode() for name in FleetSecrets.__struct_fields__]
    seen = [path.read_bytes() for path in cluster.rglob("*") if path.is_file()]
    for name in actors():
        for pid in with_descendants({place(fleet, name)[1]}):
            seen += [Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
    assert len(seen) > 10
    assert [secret for secret in wanted for text in seen if secret in text] == []


def test_replicas_are_added_and_taken_away_and_no_request_fails(fleet: FleetProcess) -> None:
    with Traffic(fleet) as traffic:
        grown = fleet.command("reload", "--replicas", "4")
        assert (grown.returncode, set(actors())) == (0, {f"replica-{i}" for i in range(4)})
        shrunk = fleet.command("reload", "--replicas", "2")
        assert shrunk.returncode == 0, shrunk.stderr
        until(lambda: set(actors()) == {"replica-0", "replica-1"}, "two actors are left")
    assert (traffic.refused, traffic.errors) == ([], [])
    # Which ones is the policy's choice, and the requests of a fast start are few.
    assert len({replica_of(reply) for reply in traffic.replies}) > 1


def test_ctrl_c_drains_and_leaves_neither_actor_nor_process(fleet: FleetProcess) -> None:
    names, processes = set(actors()), fleet.processes()
    for name in names:
        processes |= with_descendants({place(fleet, name)[1]})
    assert fleet.stop(signal.SIGINT) == 130
    assert not [pid for pid in processes if is_alive(pid)]
    for name in names:
        log = (fleet.run_dir / "logs" / f"{name}.log").read_text()
        assert log.splitlines()[-1].endswith("stopped cut_off=0")
    until(lambda: actors() == {}, "no actor is left")
    assert not list((fleet.run_dir / "specs").glob("*.url"))


def test_no_replica_outlives_a_supervisor_that_is_killed(tmp_path: Path, tiny_model: Path) -> None:
    fleet = FleetProcess(tmp_path, ray_config(tiny_model, replicas=1)).start()
    processes = fleet.processes() | with_descendants({place(fleet, "replica-0")[1]})
    fleet.kill()
    until(lambda: not any(is_alive(pid) for pid in processes), "no process is left")


def test_a_cluster_that_is_not_there_is_one_line_before_anything_is_started(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    fleet = FleetProcess(tmp_path, ray_config(tiny_model, replicas=1))
    fleet.launch()
    assert fleet.process.wait(30) == 3
    first, last = fleet.output.splitlines()
    assert first.endswith("Ray cluster …")
    assert last.startswith("prefixfleet: no Ray cluster at 127.0.0.1:1: ")


def test_a_replica_that_no_node_can_ever_hold_is_refused_with_what_it_needs(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = ray_config(tiny_model, replicas=1)
    config["worker"]["device"] = "cuda"
    fleet = FleetProcess(tmp_path, config)
    fleet.launch()
    assert fleet.process.wait(60) == 3
    last = fleet.output.splitlines()[-1]
    assert last == "prefixfleet: no node that replica-0 may run on has 1 CPUs and 1 GPUs free"


OTHER_NODE = "127.0.0.2"


@pytest.fixture
def other_node() -> Iterator[subprocess.Popen[bytes]]:
    """A second node of the cluster, which happens to be this machine under another address."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    command += [f"--address={os.environ['RAY_ADDRESS']}", f"--node-ip-address={OTHER_NODE}"]
    node = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: OTHER_NODE in living_nodes(), "the node has joined", within_s=60)
    yield node
    node.terminate()
    node.wait(60)
    until(lambda: OTHER_NODE not in living_nodes(), "the node has left", within_s=60)


def living_nodes() -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


@pytest.fixture
def network_redis(tmp_path: Path) -> Iterator[str]:
    """The URL of a Redis that other machines could reach."""
    address = ray.util.get_node_ip_address()
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    server = RedisServer(
        tmp_path, options=("--bind", "127.0.0.1", address, "--protected-mode", "no")
    )
    server.start()
    yield f"redis://{address}:{server.port}/0"
    server.kill()


def test_replicas_are_spread_over_the_nodes_and_move_when_one_is_lost(
    tmp_path: Path, tiny_model: Path, other_node: subprocess.Popen[bytes], network_redis: str
) -> None:
    config = ray_config(tiny_model, replicas=2)
    config["tenants"] = [{"name": "acme", "policy": "round_robin"}]
    refused = FleetProcess(tmp_path / "refused", config)
    refused.launch()
    assert refused.process.wait(60) == 2
    assert f"the other nodes of the Ray cluster ({OTHER_NODE}) cannot reach" in refused.output

    fleet = FleetProcess(tmp_path / "fleet", config, "--redis", network_redis).start()
    try:
        hosts = {urlsplit(replica.url).hostname: replica.id for replica in fleet.file.replicas}
        assert set(hosts) == living_nodes()
        moved, epoch = hosts[OTHER_NODE], replicas(fleet)[hosts[OTHER_NODE]]["epoch"]
        with Traffic(fleet) as traffic:
            until(lambda: len(traffic.replies) > 20, "traffic flows")
            for pid in with_descendants({other_node.pid}):
                with contextlib.suppress(ProcessLookupError):  # some end with those before them
                    os.kill(pid, signal.SIGKILL)
            until(lambda: is_back(fleet, moved, epoch), "it is back elsewhere", within_s=90)
        assert (traffic.refused, traffic.errors) == ([], [])
        assert {replica_of(reply) for reply in traffic.replies} == set(hosts.values())
        home = ray.util.get_node_ip_address()
        assert urlsplit(place(fleet, moved)[0]).hostname == home
        assert fleet.stop(signal.SIGINT) == 130
    finally:
        fleet.kill()
