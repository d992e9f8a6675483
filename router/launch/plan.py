"""From configuration to a plan of processes: ports, CPU shares, settings; nothing is started.

It knows which settings a replica and a gateway need, and neither how processes are kept running
nor what they do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.errors import ConfigError
from router.config import ConfigSource, GatewaySpec, RouterConfig, TenantConfig
from router.launch import embedded_redis
from router.launch.children import ReplicaSettings, url_of
from router.launch.config import FleetConfig
from router.launch.model_folder import PreparedModel
from router.launch.ports import any_free_port, free_ports, require_free
from router.launch.run_dir import RunDirectory
from router.launch.secrets import FleetSecrets
from router.tls import load_certificate


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Everything that will run; the URLs of `redis` are never "embedded" any more."""

    config: LoadedConfig
    fleet: FleetConfig
    redis: RedisConfig
    starts_redis: bool
    model: PreparedModel
    replicas: list[ReplicaSettings]
    gateway: GatewaySpec

    @property
    def shares_threads(self) -> bool:
        """Whether replicas divide the cores, as no number of threads is set."""
        return not self.config.plain("worker")["num_threads"]

    @property
    def stores(self) -> list[tuple[str, bool]]:
        """The Redis servers in use, each with whether it must persist."""
        index, state = self.redis.index_url, self.redis.resolved_state_url
        return [(index, index == state)] + ([(state, True)] if state != index else [])


def settle_router(config: LoadedConfig) -> RouterConfig:
    """Return the gateway's settings with real ports.

    Raises DependencyError when one is in use, or when the certificate cannot be served.
    """
    router = config.section("router", RouterConfig)
    if router.tls is not None:
        load_certificate(router.tls)
    port = router.port or any_free_port(router.host)
    admin_port = router.admin_port or any_free_port(router.admin_host)
    require_free(router.host, port, flag="--port")
    require_free(router.admin_host, admin_port, flag="--admin-port")
    return msgspec.structs.replace(router, port=port, admin_port=admin_port)


def make_plan(
    config: LoadedConfig,
    *,
    source: ConfigSource,
    run_dir: RunDirectory,
    router: RouterConfig,
    tenants: tuple[TenantConfig, ...],
    secrets: FleetSecrets,
    model: PreparedModel,
    ports: Mapping[str, int] | None = None,
) -> FleetPlan:
    """Lay out the fleet that the configuration asks for; `ports` are taken by replicas already."""
    asked = config.section("redis", RedisConfig)
    redis = _with_embedded(asked, embedded_redis.embedded_url(run_dir))
    replicas = _replicas(
        config, run_dir=run_dir, secrets=secrets, model=model, redis=redis, ports=ports or {}
    )
    gateway = GatewaySpec(
        router=router,
        tenants=tenants,
        index_url=redis.index_url,
        redis=redis,
        fleet_secret=secrets.fleet_secret,
        internal_token=secrets.internal_token,
        admin_key=secrets.admin_key,
        cache_dir=str(run_dir.path / "cache"),
        source=source,
    )
    return FleetPlan(
        config=config,
        fleet=config.section("fleet", FleetConfig),
        redis=redis,
        starts_redis=asked != redis,
        model=model,
        replicas=replicas,
        gateway=gateway,
    )


def _with_embedded(redis: RedisConfig, url: str) -> RedisConfig:
    """Put the embedded server's URL where "embedded" is asked for."""
    state_url = url if redis.state_url == EMBEDDED else redis.state_url
    index_url = url if redis.index_url == EMBEDDED else redis.index_url
    return msgspec.structs.replace(redis, index_url=index_url, state_url=state_url)


def threads_per_core(num_engine_cores: int) -> int:
    """Divide the CPUs that this process may use: at least one for each engine core."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)) // num_engine_cores)
    return max(1, (os.cpu_count() or 1) // num_engine_cores)


def _replicas(
    config: LoadedConfig,
    *,
    run_dir: RunDirectory,
    secrets: FleetSecrets,
    model: PreparedModel,
    redis: RedisConfig,
    ports: Mapping[str, int],
) -> list[ReplicaSettings]:
    fleet = config.section("fleet", FleetConfig)
    worker = config.plain("worker")
    _require_ports_of_their_own(worker["kv_events"], fleet.replicas)
    names = [f"replica-{i}" for i in range(fleet.replicas)]
    free = (p for p in free_ports(worker["host"], worker["port"]) if p not in ports.values())
    return [
        replica_settings(
            config,
            replica_id=name,
            port=ports[name] if name in ports else next(free),
            model=model,
            num_replicas=fleet.replicas,
            internal_token=secrets.internal_token,
            fleet_secret=secrets.fleet_secret,
            index_url=redis.index_url,
            redis=redis,
            socket_dir=str(Path(run_dir.socket_dir) / f"r{i}"),
        )
        for i, name in enumerate(names)
    ]


def _require_ports_of_their_own(kv_events: dict[str, Any], num_replicas: int) -> None:
    """Refuse to have several replicas on this machine announce on one port."""
    if not kv_events["enable_kv_cache_events"] or num_replicas == 1:
        return
    for field in ("endpoint", "replay_endpoint"):
        address, _, port = kv_events[field].rpartition(":")
        if port != "*":
            raise ConfigError(
                f"worker.kv_events.{field} is one port for fleet.replicas={num_replicas}; write "
                f"{address}:* and ask each replica's /kv_event_sources where it publishes"
            )


def replica_settings(
    config: LoadedConfig,
    *,
    replica_id: str,
    port: int,
    model: PreparedModel,
    num_replicas: int,
    **fields: Any,
) -> ReplicaSettings:
    """Return what one of `num_replicas` replicas on this machine is started with.

    Settings of section `worker` are handed on by name, but for the key of a replica on its own;
    `fields` say what the configuration does not.
    """
    fleet, worker = config.section("fleet", FleetConfig), config.plain("worker")
    handed_on = {
        name: worker[name]
        for name in ReplicaSettings.__struct_fields__
        if name in worker and name != "api_key"
    }
    settled: dict[str, Any] = {
        "replica_id": replica_id,
        "port": port,
        "model_folder": model.folder,
        "served_models": (worker["served_model_name"] or model.model,),
        "dtype": model.dtype,
        "num_threads": worker["num_threads"]
        or threads_per_core(num_replicas * worker["data_parallel_size"]),
        "engine": config.plain("engine"),
        "advertised_url": url_of(worker["host"], port),
        "executor": fleet.executor,
        "scripted": fleet.scripted,
    }
    return ReplicaSettings(**(handed_on | settled | fields))
