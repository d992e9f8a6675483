"""The child that stands on this machine for a replica on Ray: its settings, command and probe.

To the supervisor it is a process like any other; what it does is router/launch/ray_replica.py's.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from router.launch.children import DRAIN_MARGIN_S, ReplicaSettings
from router.launch.http_call import answers_ok
from router.launch.ray_plan import is_local
from router.launch.run_dir import RunDirectory, write_private
from router.launch.supervisor import ChildSpec

# Until a request to stop is with the actor, and until its end is heard of.
_RAY_MARGIN_S = 5.0


class RayReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica and what it takes of the cluster.

    `stays_here` keeps it on this node, because it could not reach the index from another one.
    `url_file` is where its URL is to be noted once a node has it. `folder` and `key`: see
    ReplicaOrder.
    """

    settings: ReplicaSettings
    stays_here: bool
    num_cpus: int
    num_gpus: int
    url_file: str
    folder: str
    key: str


def ray_replica(run_dir: RunDirectory, settings: ReplicaSettings) -> RayReplica:
    """Say what a replica takes: a CPU for each thread, with `device` cuda a GPU for each rank.

    Ranks that are actors of their own take their share themselves.
    """
    size = settings.tensor_parallel_size
    has_ranks_apart = size > 1 and settings.distributed_executor_backend == "ray"
    num_cores = 0 if has_ranks_apart else settings.data_parallel_size
    return RayReplica(
        settings=settings,
        stays_here=settings.index_url is None or is_local(settings.index_url),
        num_cpus=num_cores * settings.num_threads,
        num_gpus=num_cores * size if settings.device == "cuda" else 0,
        url_file=str(run_dir.url_file(settings.replica_id)),
        folder=os.getcwd(),
        key=secrets.token_hex(4),
    )


def ray_replica_child(
    run_dir: RunDirectory, settings: ReplicaSettings, *, on_url: Callable[[str, str], None]
) -> ChildSpec:
    """Describe one replica on Ray; writes its settings file.

    `on_url` hears the replica's name and URL whenever it has become ready, in the probe's thread.
    """
    name = settings.replica_id
    file, url_file = run_dir.spec_file(name), run_dir.url_file(name)
    url_file.unlink(missing_ok=True)  # of a run that was killed
    write_private(file, msgspec.json.encode(ray_replica(run_dir, settings)))

    def probe() -> bool:
        url = _noted(url_file)
        if url is None or not answers_ok(f"{url}/health"):
            return False
        on_url(name, url)
        return True

    return ChildSpec(
        name=name,
        argv=[sys.executable, "-P", "-m", "router.launch.ray_replica", "--config-json", str(file)],
        log_file=run_dir.log_file(name),
        probe=probe,
        stop_timeout_s=settings.drain_timeout_s + DRAIN_MARGIN_S + _RAY_MARGIN_S,
    )


def _noted(file: Path) -> str | None:
    try:
        return file.read_text()
    except FileNotFoundError:
        return None
