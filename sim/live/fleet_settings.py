"""What a configuration says about the fleet that a replay is to match, and where that fleet is.

Sections are read by name, as the launcher does, so nothing of the router is imported. What is
running now is not here: sim/live/client.py asks the fleet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.config import EngineConfig
from kvindex.foundation.config_loader import LoadedConfig, load_config
from kvindex.foundation.errors import ConfigError
from kvindex.foundation.tls import SYSTEM, Trust
from router.policy.planner import PlannerConfig

FileT = TypeVar("FileT")

SECTIONS: Mapping[str, str] = {
    "fleet": "router.launch.config:FleetConfig",
    "redis": "kvindex.config:RedisConfig",
    "engine": "engine.config:EngineConfig",
    "worker": "worker.config:WorkerConfig",
    "router": "router.config:RouterConfig",
    "tenants": "list[router.config:TenantConfig]",
}
"""The launcher's table; a test keeps the two equal."""

KEY_VARIABLE = "PREFIXFLEET_KEY"
"""The environment variable with the API key, where no flag gives it."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a configuration that a replay depends on.

    `blocks` None: only the running replicas know how much memory they found.
    """

    engine: EngineConfig
    planner: PlannerConfig
    policy: str
    params: dict[str, float]
    replicas: int
    blocks: int | None
    run_dir: Path


class FleetAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway listens and what opens it; without an admin API less can be compared."""

    url: str
    key: str | None
    admin_url: str | None = None
    admin_key: str | None = None
    trust: Trust = SYSTEM


class _Replica(msgspec.Struct):
    url: str


class _Tls(msgspec.Struct):
    certificate: str


class _FleetFile(msgspec.Struct):
    """What of a run directory's fleet.json is needed here."""

    url: str
    admin_url: str
    admin_key: str
    keys: dict[str, str]
    replicas: list[_Replica] = []
    tls: _Tls | None = None
    ready: bool = False


class _SecretsFile(msgspec.Struct):
    internal_token: str | None = None


def read_settings(file: Path | None) -> FleetSettings:
    """Read a configuration; raise ConfigError naming place and remedy."""
    if file is None:
        raise ConfigError("which fleet? name its configuration with -c FILE")
    return settings_of(load_config(SECTIONS, file=file, environ=os.environ, overrides={}))


def settings_of(config: LoadedConfig) -> FleetSettings:
    """Pick out what a replay depends on."""
    fleet, router = config.plain("fleet"), config.plain("router")
    return FleetSettings(
        engine=config.section("engine", EngineConfig),
        planner=_planner(router),
        policy=router["default_policy"],
        params=router["default_policy_params"],
        replicas=fleet["replicas"],
        blocks=_scripted_blocks(fleet),
        run_dir=Path(fleet["run_dir"]),
    )


def _planner(router: dict[str, Any]) -> PlannerConfig:
    """Configure the planner as the gateway does."""
    return msgspec.convert(
        {
            "max_queue_s": router["first_token_timeout_s"],
            "saturation_s": router["saturation_s"],
            "max_siblings": router["max_siblings"],
            "queue": router["queue"],
            "replication": router["hot_prefixes"],
        },
        type=PlannerConfig,
    )


def _scripted_blocks(fleet: dict[str, Any]) -> int | None:
    """Return the usable blocks of a scripted replica, one less than it has; else None."""
    num_blocks = fleet["scripted"].get("num_blocks")
    return num_blocks - 1 if fleet["executor"] == "scripted" and num_blocks else None


def find_fleet(
    run_dir: Path,
    *,
    url: str | None,
    key: str | None,
    admin_url: str | None,
    admin_key: str | None,
    ca: str | None = None,
) -> FleetAddress:
    """Take the addresses that are given, else those of the fleet that runs in `run_dir`.

    Raises ConfigError when neither says where the fleet is.
    """
    if url is not None:
        return FleetAddress(
            url=base_url(url),
            key=key,
            admin_url=None if admin_url is None else base_url(admin_url),
            admin_key=admin_key,
            trust=Trust(ca=ca),
        )
    found = _running(run_dir)
    return FleetAddress(
        url=found.url,
        key=key or next(iter(found.keys.values()), None),
        admin_url=found.admin_url,
        admin_key=found.admin_key,
        trust=SYSTEM if found.tls is None else Trust(certificate=found.tls.certificate),
    )


def find_replica(run_dir: Path) -> FleetAddress:
    """Return where the first replica of the running fleet listens, and the token that opens it.

    Raises ConfigError when no fleet runs there.
    """
    found = _running(run_dir)
    secrets = _decoded(run_dir / "secrets.json", _SecretsFile)
    if not found.replicas:
        raise ConfigError(f"{run_dir / 'fleet.json'}: it names no replica; give --url")
    return FleetAddress(url=found.replicas[0].url, key=secrets.internal_token)


def _running(run_dir: Path) -> _FleetFile:
    file = run_dir / "fleet.json"
    found = _decoded(file, _FleetFile)
    if not found.ready:
        raise ConfigError(f"{file}: no fleet runs there; start it with `prefixfleet up`")
    return found


def _decoded(file: Path, kind: type[FileT]) -> FileT:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; start the fleet, or say where one is with --url"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None


def base_url(url: str) -> str:
    """Return a URL without a trailing slash or `/v1`, so that both spellings work.

    Raises ConfigError for what is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: expected a URL such as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
