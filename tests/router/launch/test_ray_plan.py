"""What follows from a Ray cluster before anything is started on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from router.launch.children import ReplicaSettings
from router.launch.config import load_fleet_config
from router.launch.ray_child import ray_replica
from router.launch.ray_cluster import RayCluster, RayNode
from router.launch.ray_plan import is_local, largest_share, require_reachable, settle_on_ray
from router.launch.run_dir import RunDirectory


def cluster(*cpus: int) -> RayCluster:
    """A cluster of nodes with so many CPUs; we are on the first."""
    nodes = [
        RayNode(address=f"10.0.0.{i}", num_cpus=number, num_gpus=0)
        for i, number in enumerate(cpus, start=1)
    ]
    return RayCluster(here="10.0.0.1", nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("embedded", True),
        ("unix:///run/redis.sock", True),
        ("redis://127.0.0.1:6379/0", True),
        ("redis://:password@localhost/0", True),
        ("redis://[::1]:6379", True),
        ("redis:///0", True),
        ("redis+cluster://127.0.0.1:7000,127.0.0.1:7001", True),
        ("redis+cluster://127.0.0.1:7000,10.0.0.9:7001", False),
        ("rediss://redis.internal:6380/0", False),
        ("redis://localhost.internal/0", False),
    ],
)
def test_a_redis_on_loopback_or_a_socket_is_for_this_machine_alone(
    url: str, expected: bool
) -> None:
    assert is_local(url) is expected


@pytest.mark.parametrize(
    ("cpus", "num_replicas", "num_cores", "expected"),
    [
        ([8], 2, 1, 4),
        ([3, 3], 3, 1, 1),
        ([4, 4], 3, 1, 2),
        ([16, 2], 2, 1, 8),
        ([8, 8], 2, 2, 4),
        ([2], 3, 1, 1),
        ([], 2, 1, 1),
    ],
)
def test_threads_are_as_many_as_leave_room_for_every_replica(
    cpus: list[int], num_replicas: int, num_cores: int, expected: int
) -> None:
    assert largest_share(cpus, num_replicas=num_replicas, num_cores=num_cores) == expected


def test_a_redis_that_other_nodes_cannot_reach_is_refused_with_the_remedy() -> None:
    require_reachable("embedded", cluster(4))
    require_reachable("redis://redis.internal:6379/0", cluster(4, 4))
    with pytest.raises(ConfigError) as caught:
        require_reachable("redis://:secret@127.0.0.1:6379/0", cluster(4, 4, 4))
    assert str(caught.value) == (
        "redis.index_url is redis://:***@127.0.0.1:6379/0, which replicas on the other nodes of "
        "the Ray cluster (10.0.0.2, 10.0.0.3) cannot reach; name a Redis on their network with "
        "--redis redis://HOST:PORT"
    )


def test_the_cluster_settles_the_threads_unless_they_are_set() -> None:
    said: list[str] = []
    config = load_fleet_config(None, {"fleet.replicas": 2})
    assert settle_on_ray(config, cluster(8), say=said.append) == {"worker.num_threads": 4}
    config = load_fleet_config(None, {"fleet.replicas": 2, "worker.num_threads": 3})
    assert settle_on_ray(config, cluster(8), say=said.append) == {"worker.num_threads": 3}
    assert said == [f"Ray: 8 CPUs, nodes: 1; a replica takes {number}" for number in (4, 3)]


def test_a_cluster_that_is_too_small_is_waited_for_if_it_can_grow_and_else_refused() -> None:
    said: list[str] = []
    wanted = {"fleet.replicas": 3}
    config = load_fleet_config(None, {**wanted, "redis.index_url": "redis://redis.internal/0"})
    settle_on_ray(config, cluster(1, 1), say=said.append)
    lack = "the Ray cluster has room for 2 of 3 replicas of 1 CPUs"
    assert said[-1] == f"warning: {lack}; the others wait for it to grow"
    with pytest.raises(ConfigError) as caught:
        settle_on_ray(load_fleet_config(None, wanted), cluster(2), say=said.append)
    assert str(caught.value) == (
        f"{lack}, and beside a Redis of this machine it cannot grow; lower fleet.replicas "
        "or worker.num_threads, or give this node more with `ray start --num-cpus`"
    )


def settings(**fields: Any) -> ReplicaSettings:
    """Settings of a replica as the plan has them, but for `fields`."""
    planned: dict[str, Any] = {
        "replica_id": "replica-0",
        "host": "127.0.0.1",
        "port": 8100,
        "model_folder": "/model",
        "served_models": ("m",),
        "dtype": "float32",
        "num_threads": 3,
        "engine": {},
        "index_url": "redis://redis.internal:6379/0",
        "advertised_url": "http://127.0.0.1:8100",
        "renew_s": 2.0,
        "lease_s": 10.0,
        "drain_timeout_s": 30.0,
    }
    return ReplicaSettings(**(planned | fields))


def test_a_replica_takes_a_cpu_for_each_thread_and_on_cuda_a_gpu_for_each_rank(
    tmp_path: Path,
) -> None:
    run_dir = RunDirectory(tmp_path)
    plain = ray_replica(run_dir, settings(data_parallel_size=2))
    assert (plain.num_cpus, plain.num_gpus, plain.stays_here) == (6, 0, False)
    on_gpus = ray_replica(run_dir, settings(device="cuda", tensor_parallel_size=4))
    assert (on_gpus.num_cpus, on_gpus.num_gpus) == (3, 4)
    ranks = {"tensor_parallel_size": 4, "distributed_executor_backend": "ray"}
    apart = ray_replica(run_dir, settings(device="cuda", **ranks))
    assert (apart.num_cpus, apart.num_gpus) == (0, 0)


def test_a_replica_whose_index_is_here_stays_here(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    assert ray_replica(run_dir, settings(index_url="unix:///run/redis.sock")).stays_here
