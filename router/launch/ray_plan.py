"""What a Ray cluster means for a fleet, settled before anything is started.

Which Redis its nodes can reach, and how many threads each replica gets. The cluster is looked at by
a process of its own (router/launch/ray_cluster.py); Ray is never imported here.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import msgspec

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.die_with_parent import wrap
from kvindex.foundation.errors import ConfigError, DependencyError, PrefixFleetError
from kvindex.redis_connect import mask_url
from router.launch.config import FleetConfig
from router.launch.ray_cluster import EXIT_CONFIG, REMEDY, RayCluster

# About 3 where there is a cluster; Ray itself looks for minutes for one that was killed.
_LOOK_TIMEOUT_S = 60.0


def look_at_cluster() -> RayCluster:
    """Return the Ray cluster of this machine; takes a few seconds.

    Raises ConfigError or DependencyError with the one line that the process ended with.
    """
    argv = wrap([sys.executable, "-P", "-m", "router.launch.ray_cluster"], signal.SIGKILL)
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=_LOOK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise DependencyError(
            f"the Ray cluster here does not answer within {_LOOK_TIMEOUT_S:g} s; {REMEDY}"
        ) from None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode != 0:
        reason = said[-1] if said else f"looking at the Ray cluster ended with {done.returncode}"
        error: type[PrefixFleetError] = (
            ConfigError if done.returncode == EXIT_CONFIG else DependencyError
        )
        raise error(reason.removeprefix("prefixfleet: "))
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=RayCluster)


def settle_on_ray(
    config: LoadedConfig, cluster: RayCluster, *, say: Callable[[str], None]
) -> dict[str, object]:
    """Return the settings that follow from the cluster, by dotted path.

    Raises ConfigError when the replicas could not reach the index from every node, or stay on this
    one and do not fit.
    """
    index_url = config.section("redis", RedisConfig).index_url
    require_reachable(index_url, cluster)
    num_replicas, worker = config.section("fleet", FleetConfig).replicas, config.plain("worker")
    num_cores = worker["data_parallel_size"]
    cpus = [node.num_cpus for node in cluster.nodes]
    num_threads = worker["num_threads"] or largest_share(
        cpus, num_replicas=num_replicas, num_cores=num_cores
    )
    each = num_threads * num_cores
    say(f"Ray: {sum(cpus)} CPUs, nodes: {len(cpus)}; a replica takes {each}")
    num_places = places(cpus, each)
    if num_places < num_replicas:
        lack = (
            f"the Ray cluster has room for {num_places} of {num_replicas} replicas of {each} CPUs"
        )
        if is_local(index_url):
            raise ConfigError(
                f"{lack}, and beside a Redis of this machine it cannot grow; lower fleet.replicas "
                "or worker.num_threads, or give this node more with `ray start --num-cpus`"
            )
        say(f"warning: {lack}; the others wait for it to grow")
    return {"worker.num_threads": num_threads}


def require_reachable(index_url: str, cluster: RayCluster) -> None:
    """Raise ConfigError when a replica on some node could not reach the index."""
    others = {node.address for node in cluster.nodes} - {cluster.here}
    if others and is_local(index_url):
        raise ConfigError(
            f"redis.index_url is {mask_url(index_url)}, which replicas on the other nodes of the "
            f"Ray cluster ({', '.join(sorted(others))}) cannot reach; name a Redis on their "
            "network with --redis redis://HOST:PORT"
        )


def is_local(url: str) -> bool:
    """Tell whether a Redis URL leads nowhere but to this machine."""
    parts = urlsplit(url)
    if url == EMBEDDED or parts.scheme == "unix":
        return True
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return all(_is_loopback(urlsplit(f"//{host}").hostname) for host in hosts)


def _is_loopback(host: str | None) -> bool:
    return host is None or host in ("localhost", "::1") or host.startswith("127.")


def places(cpus: Iterable[int], each: int) -> int:
    """Return how many replicas of `each` CPUs find room on nodes with so many CPUs."""
    return sum(number // each for number in cpus)


def largest_share(cpus: list[int], *, num_replicas: int, num_cores: int) -> int:
    """Return the most threads of an engine core with which every replica finds room, at least 1."""
    shares = range(max(cpus, default=1) // num_cores, 1, -1)
    return next((n for n in shares if places(cpus, n * num_cores) >= num_replicas), 1)
