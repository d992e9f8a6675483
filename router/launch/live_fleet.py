"""What runs of a fleet now, and fleet.json, which says so: both are kept true here.

It knows which child stands for which part of the plan; in which order they come and go is decided
by whoever starts, reloads and ends the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from router.launch.children import (
    ReplicaSettings,
    gateway_child,
    gateway_names,
    replica_child,
    write_gateway_spec,
)
from router.launch.config import FleetConfig
from router.launch.fleet_file import FleetFile, ReplicaEntry, write_fleet_file
from router.launch.gateway_seats import GatewaySeats
from router.launch.plan import FleetPlan
from router.launch.ray_child import ray_replica_child
from router.launch.restart import RestartPolicy
from router.launch.run_dir import RunDirectory
from router.launch.supervisor import ChildSpec, Supervisor


class LiveFleet:
    """`plan` is what runs, `ports` those that replicas have had."""

    def __init__(
        self, plan: FleetPlan, file: FleetFile, *, run_dir: RunDirectory, say: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.file = file
        self.run_dir = run_dir
        self._hearers = [say]
        self.ports = {replica.replica_id: replica.port for replica in plan.replicas}
        self.seats = GatewaySeats(plan.gateway.router, run_dir.gateway_socket_dir)
        self.supervisor = Supervisor(
            restart_policy(plan.fleet), on_pid=self._note_pid, say=self.say
        )

    def say(self, text: str) -> None:
        """Tell whoever looks."""
        for hear in self._hearers:
            hear(text)

    @contextmanager
    def heard_by(self, hear: Callable[[str], None]) -> Iterator[None]:
        """Tell one more inside the block."""
        self._hearers.append(hear)
        try:
            yield
        finally:
            self._hearers.remove(hear)

    @property
    def replica_names(self) -> list[str]:
        """The replicas that are to run."""
        return [replica.replica_id for replica in self.plan.replicas]

    @property
    def gateway_names(self) -> list[str]:
        """The processes of the gateway."""
        return gateway_names(self.plan.gateway.router)

    def replica_child(self, settings: ReplicaSettings) -> ChildSpec:
        """Describe a replica by the launcher that the fleet uses."""
        if self.plan.fleet.launcher == "local":
            return replica_child(self.run_dir, settings)
        loop = asyncio.get_running_loop()

        def note_url(replica_id: str, url: str) -> None:
            loop.call_soon_threadsafe(self._note_url, replica_id, url)

        return ray_replica_child(self.run_dir, settings, on_url=note_url)

    def gateway_child(self, number: int) -> ChildSpec:
        """Describe the gateway process of a seat, as the plan of now has it."""
        return gateway_child(self.run_dir, self.plan.gateway, self.seats, number)

    def write_gateway_spec(self) -> None:
        """Let a gateway process that is started again read what the plan says."""
        write_gateway_spec(self.run_dir, self.plan.gateway)

    def take_in(self, settings: ReplicaSettings) -> None:
        """Count a replica among those that are to run, or note its new settings."""
        name = settings.replica_id
        self.ports[name] = settings.port
        others = [replica for replica in self.plan.replicas if replica.replica_id != name]
        self.plan = replace(self.plan, replicas=[*others, settings])
        self.file.model, self.file.model_folder = settings.served_models[0], settings.model_folder
        self.file.dtype = settings.dtype
        if name not in self.file.logs:
            self.file.logs[name] = str(self.run_dir.log_file(name))
            self.file.replicas.append(ReplicaEntry(id=name, url=settings.advertised_url))
        self.rewrite_file()

    def drop(self, name: str) -> None:
        """Count a replica among those that are to run no more."""
        others = [replica for replica in self.plan.replicas if replica.replica_id != name]
        self.plan = replace(self.plan, replicas=others)
        self.file.logs.pop(name, None)
        self.file.replicas = [replica for replica in self.file.replicas if replica.id != name]
        self.rewrite_file()

    def rewrite_file(self) -> None:
        """Bring the fleet file up to date, once there is one."""
        if not self.file.ready:
            return
        try:
            write_fleet_file(self.run_dir, self.file)
        except OSError as error:
            # The fleet goes on serving; only what the file says of pids is out of date.
            self.say(f"warning: cannot rewrite {self.run_dir.fleet_file}: {error}")

    def _note_pid(self, process: str, pid: int | None) -> None:
        self.file.set_pid(process, pid)
        if pid is None:
            self.run_dir.url_file(process).unlink(missing_ok=True)
        self.rewrite_file()

    def _note_url(self, replica_id: str, url: str) -> None:
        self.file.set_url(replica_id, url)
        self.rewrite_file()


def restart_policy(fleet: FleetConfig) -> RestartPolicy:
    """Return how often, and how soon, a process that ends by itself is started again."""
    return RestartPolicy(
        fleet.backoff_initial_s, fleet.backoff_max_s, fleet.restart_budget, fleet.restart_window_s
    )
