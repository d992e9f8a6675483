"""The Ray cluster that a fleet runs on: joining it, and what nodes it has.

As a program (`python -m router.launch.ray_cluster`) it prints those as JSON, so that whoever asks
needs no Ray in its own process. It starts no cluster and knows no replicas.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own: the cluster to join, `host:port`; without it, the one that runs on this machine."""

_ANY = "auto"
_ANSWER_S = 5.0
REMEDY = f"start one with `ray start --head`, or name one with {ADDRESS_VARIABLE}=HOST:PORT"

EXIT_CONFIG = 2
EXIT_DEPENDENCY = 3


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """One living node and what it has in all."""

    address: str
    num_cpus: int
    num_gpus: int


class RayCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The living nodes; `here` is the address of the one that this process runs on."""

    here: str
    nodes: tuple[RayNode, ...]


@contextmanager
def joined() -> Iterator[None]:
    """Be a driver of the cluster inside the block; what it has started there ends with it.

    DependencyError when there is no cluster, or no Ray; ConfigError for what is no address of one.
    """
    try:
        import ray
    except ImportError:
        raise DependencyError(
            "launcher ray needs Ray; run 'pip install prefixfleet[ray]'"
        ) from None
    _require_answer(os.environ.get(ADDRESS_VARIABLE) or _ANY)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DependencyError(f"no Ray cluster: {lines[0].rstrip('.')}; {REMEDY}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Find out at once what Ray would find out in minutes: that nobody listens there."""
    if address == _ANY:
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal()):
        raise ConfigError(
            f"{ADDRESS_VARIABLE}={address}: expected HOST:PORT of a cluster that this machine is a "
            "node of, by `ray start --address=HOST:PORT`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise DependencyError(f"no Ray cluster at {address}: {error}; {REMEDY}") from None


def living_nodes() -> RayCluster:
    """Return the nodes of the cluster that this process has joined."""
    import ray

    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = tuple(
        RayNode(
            address=node["NodeManagerAddress"],
            num_cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in listed
        if node["Alive"]
    )
    return RayCluster(here=node_address(), nodes=nodes)


def node_address() -> str:
    """Return the address at which the cluster knows the node of this process."""
    from ray.util import get_node_ip_address

    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def main() -> int:
    """Print the cluster as JSON; return the exit code."""
    try:
        with joined():
            cluster = living_nodes()
    except ConfigError as error:
        print(f"prefixfleet: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except DependencyError as error:
        print(f"prefixfleet: {error}", file=sys.stderr)
        return EXIT_DEPENDENCY
    print(msgspec.json.encode(cluster).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
