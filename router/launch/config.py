"""Settings of a fleet on one machine (section `fleet`), and the table of all sections.

The table names the Structs of other packages as text: the launcher hands sections on to child
processes and imports none of the code behind them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvindex.foundation import config_reference
from kvindex.foundation.config_loader import LoadedConfig, load_config
from kvindex.foundation.errors import ConfigError
from router.config import ConfigSource, RouterConfig, TenantConfig
from router.policy.registry import build_policy
from router.tenancy.tenants import TenantDirectory

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]

SECTIONS: Mapping[str, str] = {
    "fleet": "router.launch.config:FleetConfig",
    "redis": "kvindex.config:RedisConfig",
    "engine": "engine.config:EngineConfig",
    "worker": "worker.config:WorkerConfig",
    "router": "router.config:RouterConfig",
    "tenants": "list[router.config:TenantConfig]",
}


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas `up` starts and where, where it keeps its files, how it restarts them.

    A process that ends by itself is started again after `backoff_initial_s`, doubled at each end
    up to `backoff_max_s`; more than `restart_budget` ends within `restart_window_s` end the fleet
    with exit code 4. `launcher` "local" starts the replicas on this machine, "ray" has Ray place
    them on the nodes of its cluster. `executor` "scripted" gives deterministic tokens without a
    model, for tests; `scripted` sizes it, with the fields of `ScriptedModel` in
    worker/core/spec.py.
    """

    replicas: Annotated[int, msgspec.Meta(ge=1)] = 2
    launcher: Literal["local", "ray"] = "local"
    run_dir: str = ".prefixfleet"
    executor: Literal["model", "scripted"] = "model"
    scripted: dict[str, Any] = {}
    ready_timeout_s: Seconds = 180.0
    backoff_initial_s: Seconds = 0.5
    backoff_max_s: Seconds = 30.0
    restart_budget: Count = 5
    restart_window_s: Seconds = 300.0


def load_fleet_config(
    file: Path | None, overrides: Mapping[str, object], *, demo: bool = False
) -> LoadedConfig:
    """Load all sections; with `demo`, the packaged `dev.yaml` stands in for a missing file."""
    if file is None and demo:
        file = demo_config_file()
    config = load_config(SECTIONS, file=file, environ=os.environ, overrides=overrides)
    source = str(file) if file is not None else "defaults"
    _check_tenants(config, source)
    _check_policies(config, source)
    return config


def default_of(setting: str) -> str:
    """Return what the setting at a dotted path is where nobody sets it."""
    return config_reference.default_of(SECTIONS, setting)


def config_source(
    file: Path | None, overrides: Mapping[str, object], *, demo: bool = False
) -> ConfigSource:
    """Say where these settings come from, for a gateway that is to read them again."""
    if file is None and demo:
        file = demo_config_file()
    return ConfigSource(
        file=None if file is None else str(file.absolute()), overrides=dict(overrides)
    )


def _check_tenants(config: LoadedConfig, source: str) -> None:
    """Raise ConfigError for names and keys that are there twice."""
    try:
        TenantDirectory(config.entries("tenants", TenantConfig))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_policies(config: LoadedConfig, source: str) -> None:
    """Build every policy that is named: its name and parameters are right, or it is said where."""
    router = config.section("router", RouterConfig)
    build_policy(
        router.default_policy,
        router.default_policy_params,
        owner=f"{source}: router.default_policy",
    )
    for i, tenant in enumerate(config.entries("tenants", TenantConfig)):
        if tenant.policy is not None:
            owner = f"{source}: tenants[{i}].policy ({tenant.name})"
            build_policy(tenant.policy, tenant.policy_params, owner=owner)


def demo_config_file() -> Path:
    """Return the configuration of the demo: packaged with a wheel, else in the repository."""
    here = Path(__file__).resolve().parent
    for folder in (here / "configs", here.parent.parent / "configs"):
        if (folder / "dev.yaml").is_file():
            return folder / "dev.yaml"
    raise ConfigError("the packaged configs/dev.yaml is missing; reinstall prefixfleet, or use -c")
