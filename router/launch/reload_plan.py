"""What a changed configuration means for a running fleet: what starts, restarts, ends. Pure.

Settings are compared as the processes get them, so a reload that was stopped half way is taken up
where it stopped. It starts and stops nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvindex.foundation.errors import ConfigError
from router.hot_settings import needs_restart
from router.launch.children import ReplicaSettings
from router.launch.plan import FleetPlan

_OF_ONE_REPLICA = (
    "replica_id",
    "port",
    "advertised_url",
    "socket_dir",
    "internal_token",
    "fleet_secret",
    "index_url",
    "redis",
)
_SETTING_OF = {
    "model_folder": "worker.model",
    "served_models": "worker.served_model_name",
    "executor": "fleet.executor",
    "scripted": "fleet.scripted",
}
_FIXED_FLEET = ("run_dir", "launcher")
_FIXED_ROUTER = ("host", "port", "admin_host", "admin_port", "tls", "processes")
_OF_THE_SUPERVISOR = (
    "ready_timeout_s",
    "backoff_initial_s",
    "backoff_max_s",
    "restart_budget",
    "restart_window_s",
)
_OF_A_POOL = ("block_size", "hash_seed")


class Restart(NamedTuple):
    """A replica that needs other settings, and the names of those that differ."""

    settings: ReplicaSettings
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """The way from what runs to `wanted`; `gateway` names why the gateway has to restart.

    `applied` names what takes effect without a restart; `keys` are all generated keys by tenant.
    """

    wanted: FleetPlan
    keys: dict[str, str]
    starts: tuple[ReplicaSettings, ...]
    restarts: tuple[Restart, ...]
    stops: tuple[str, ...]
    gateway: tuple[str, ...]
    applied: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not (self.starts or self.restarts or self.stops or self.gateway or self.applied)

    def lines(self) -> Iterator[str]:
        """Say what is going to happen, in its order."""
        if self.applied:
            yield f"at once: {', '.join(self.applied)}"
        if self.starts:
            yield f"to start: {', '.join(s.replica_id for s in self.starts)}"
        for restart in self.restarts:
            yield f"to restart: {restart.settings.replica_id} ({', '.join(restart.changed)})"
        if self.stops:
            yield f"to end: {', '.join(self.stops)}"
        if self.gateway:
            yield f"to restart: the gateway ({', '.join(self.gateway)})"


def plan_reload(
    running: FleetPlan, wanted: FleetPlan, *, keys: dict[str, str], known_keys: dict[str, str]
) -> ReloadPlan:
    """Compare what runs with what is wanted; `known_keys` are the generated ones of now.

    Raises ConfigError naming the settings that a running fleet cannot change.
    """
    _refuse_fixed(running, wanted)
    known = {replica.replica_id: replica for replica in running.replicas}
    starts, restarts = [], []
    for settings in wanted.replicas:
        old = known.pop(settings.replica_id, None)
        if old is None:
            starts.append(settings)
            continue
        changed = _changed(old, settings, threads_are_shared=wanted.shares_threads)
        _refuse_another_pool(old, settings)
        if changed:
            restarts.append(Restart(settings, changed))
    return ReloadPlan(
        wanted=wanted,
        keys=keys,
        starts=tuple(starts),
        restarts=tuple(restarts),
        stops=tuple(reversed(known)),
        gateway=(
            *needs_restart(running.gateway.router, wanted.gateway.router),
            *(f"a key for tenant {tenant}" for tenant in keys if tenant not in known_keys),
        ),
        applied=_applied(running, wanted),
    )


def _refuse_fixed(running: FleetPlan, wanted: FleetPlan) -> None:
    old, new = running.gateway.router, wanted.gateway.router
    names = [f"router.{n}" for n in _FIXED_ROUTER if getattr(old, n) != getattr(new, n)]
    names += [
        f"fleet.{n}" for n in _FIXED_FLEET if getattr(running.fleet, n) != getattr(wanted.fleet, n)
    ]
    names += ["redis"] if running.redis != wanted.redis else []
    if names:
        raise ConfigError(
            f"{', '.join(names)}: cannot change while the fleet runs; put it back, or end the "
            "fleet with `prefixfleet down` and start it anew"
        )


def _refuse_another_pool(old: ReplicaSettings, new: ReplicaSettings) -> None:
    """Refuse what would have the new replica refused beside the old ones."""
    if old.served_models != new.served_models:
        return
    names = [f"engine.{n}" for n in _OF_A_POOL if old.engine.get(n) != new.engine.get(n)]
    if names:
        raise ConfigError(
            f"{', '.join(names)}: all replicas that serve {new.served_models[0]} have to agree; "
            "give it another worker.served_model_name as well, or end the fleet with "
            "`prefixfleet down` and start it anew"
        )


def _changed(
    old: ReplicaSettings, new: ReplicaSettings, *, threads_are_shared: bool
) -> tuple[str, ...]:
    """Name the settings of a replica that differ.

    Another number of replicas means another share of the cores; that alone restarts nobody.
    """
    names: list[str] = []
    for field in ReplicaSettings.__struct_fields__:
        before, after = getattr(old, field), getattr(new, field)
        if field in _OF_ONE_REPLICA or before == after:
            continue
        if field == "num_threads" and threads_are_shared:
            continue
        if field == "engine":
            names += [f"engine.{name}" for name in after if before.get(name) != after[name]]
        else:
            names.append(_SETTING_OF.get(field, f"worker.{field}"))
    return tuple(names)


def _applied(running: FleetPlan, wanted: FleetPlan) -> tuple[str, ...]:
    old, new = running.gateway, wanted.gateway
    names = ["tenants"] if old.tenants != new.tenants else []
    for name in ("default_policy", "default_policy_params"):
        names += (
            [f"router.{name}"] if getattr(old.router, name) != getattr(new.router, name) else []
        )
    before, after = msgspec.structs.asdict(running.fleet), msgspec.structs.asdict(wanted.fleet)
    names += [f"fleet.{name}" for name in _OF_THE_SUPERVISOR if before[name] != after[name]]
    return tuple(names)
