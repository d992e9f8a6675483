"""Stands on the fleet's machine for one replica on Ray: `python -m router.launch.ray_replica`.

It has an actor run the replica, writes what the replica says as its own output and ends as the
replica does, with its exit code, so that the supervisor needs to know no Ray. If this process
ends in any other way, Ray ends the actor, and the actor's end that of the replica.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvindex.foundation.errors import ConfigError, DependencyError
from router.launch.process_group import in_words
from router.launch.ray_actor import Ended, FromActor, Output, Placed, ReplicaActor, ReplicaOrder
from router.launch.ray_child import RayReplica
from router.launch.ray_cluster import EXIT_CONFIG, EXIT_DEPENDENCY, joined
from router.launch.run_dir import write_private

EXIT_OK = 0
EXIT_LOST = 1
_SIGNAL_EXIT = 128
# A cluster with room places an actor within seconds; longer than this, and the log says why.
_PATIENCE_S = 10.0


class RemoteReplica:
    """One replica on the cluster that this process has joined, from its actor to its end."""

    def __init__(self, replica: RayReplica) -> None:
        self._replica = replica
        self._name = replica.settings.replica_id
        self._decoder: msgspec.msgpack.Decoder[FromActor] = msgspec.msgpack.Decoder(FromActor)
        self._is_placed = False
        self._stop = asyncio.Event()
        self._actor: Any = None

    async def run(self) -> int:
        """Run the replica until it ends or a signal ends it; return its exit code."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._stop.set)
        self._actor = self._make_actor()
        following = asyncio.create_task(self._follow(), name="follow")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        watched: set[asyncio.Task[Any]] = {following, stopping}
        await asyncio.wait(watched, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not (self._is_placed or following.done() or stopping.done()):
            self._say(f"waits for a node with {self._needs()}")
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not following.done():
            if not self._is_placed:
                following.cancel()
                return EXIT_OK
            self._actor.stop.remote()
        return await following

    def _make_actor(self) -> Any:
        """Ask for an actor; it takes its place when the cluster has room for it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy: Any = "SPREAD"
        if self._replica.stays_here:
            here = ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
        remote: Any = ray.remote(ReplicaActor)
        return remote.options(
            name=self._name,
            num_cpus=self._replica.num_cpus,
            num_gpus=self._replica.num_gpus,
            max_concurrency=2,
            scheduling_strategy=strategy,
        ).remote()

    async def _follow(self) -> int:
        """Take what the actor tells; return the exit code, EXIT_LOST when the actor is gone."""
        from ray.exceptions import ActorUnschedulableError, RayError

        try:
            async for told in self._actor.run.remote(self._order()):
                match self._decoder.decode(await told):
                    case Placed() as placed:
                        self._note(placed)
                    case Output(data=data):
                        sys.stdout.buffer.write(data)
                        sys.stdout.buffer.flush()
                    case Ended(code=code):
                        return self._exit_code(code)
        except ActorUnschedulableError:
            raise DependencyError(
                f"no node that {self._name} may run on has {self._needs()}"
            ) from None
        except RayError as error:
            self._say(f"has lost its actor: {str(error).strip().splitlines()[-1].strip()}")
        return EXIT_LOST

    def _order(self) -> bytes:
        replica = self._replica
        order = ReplicaOrder(
            settings=replica.settings,
            on_network=not replica.stays_here,
            folder=replica.folder,
            key=replica.key,
        )
        return msgspec.msgpack.encode(order)

    def _note(self, placed: Placed) -> None:
        self._is_placed = True
        self._say(f"runs on node {placed.node} as pid {placed.pid}, {placed.url}")
        write_private(Path(self._replica.url_file), placed.url.encode())

    def _exit_code(self, code: int) -> int:
        """Return a replica's exit code; as shells do, above 128 for one that a signal ended."""
        if code >= 0:
            return code
        self._say(in_words(code))
        return _SIGNAL_EXIT - code

    def _needs(self) -> str:
        replica = self._replica
        gpus = f" and {replica.num_gpus} GPUs" if replica.num_gpus else ""
        return f"{replica.num_cpus} CPUs{gpus} free"

    def _say(self, text: str) -> None:
        print(f"{self._name} {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one replica on Ray; return the exit code."""
    parser = argparse.ArgumentParser(prog="router.launch.ray_replica", description=__doc__)
    parser.add_argument("--config-json", required=True, metavar="FILE", type=Path)
    file: Path = parser.parse_args(argv).config_json
    replica = msgspec.json.decode(file.read_bytes(), type=RayReplica)
    # Ray lets its workers import from the driver's working directory: be where no module is.
    os.chdir(file.parent)
    try:
        with joined():
            return asyncio.run(RemoteReplica(replica).run())
    except ConfigError as error:
        print(f"prefixfleet: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except DependencyError as error:
        print(f"prefixfleet: {error}", file=sys.stderr)
        return EXIT_DEPENDENCY


if __name__ == "__main__":
    sys.exit(main())
