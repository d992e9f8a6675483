"""`prefixfleet gateway`: a gateway alone, in front of engines that are already there.

With `--replica URL` it serves stock OpenAI-compatible engines at once, in FALLBACK. It writes the
gateway's settings into the run directory and becomes the gateway process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_loader import LoadedConfig
from kvindex.foundation.errors import ConfigError
from router.config import GatewaySpec, RouterConfig, StaticReplica, TenantConfig
from router.launch.children import GATEWAY, url_of
from router.launch.config import FleetConfig, config_source, load_fleet_config
from router.launch.plan import settle_router
from router.launch.port_flags import add_ports
from router.launch.run_dir import RunDirectory, write_private
from router.launch.secrets import load_or_create_secrets
from router.policy.registry import POLICIES


def gateway(invocation: Invocation) -> NoReturn:
    """Serve until a signal; does not return."""
    parser = _parser(invocation)
    flags = parser.read()
    overrides = parser.overrides(flags)
    if flags.replica:
        overrides["router.replicas"] = [{"url": url} for url in flags.replica]
    config = load_fleet_config(invocation.config_file, overrides)
    run_dir = RunDirectory(Path(config.section("fleet", FleetConfig).run_dir))
    source = config_source(invocation.config_file, overrides)
    spec = msgspec.structs.replace(gateway_spec(config, run_dir), source=source)
    run_dir.create()
    file = run_dir.spec_file(GATEWAY)
    write_private(file, msgspec.json.encode(spec))
    _announce(spec, run_dir)
    argv = [sys.executable, "-P", "-m", "router.gateway", "--config-json", str(file)]
    os.execv(sys.executable, argv)


def _parser(invocation: Invocation) -> CommandParser:
    parser = CommandParser(invocation, "Run a gateway in front of engines that already serve.")
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="an engine that serves already; may be repeated (default: router.replicas)",
    )
    parser.override("--host", "router.host", metavar="ADDRESS", help="where the API listens")
    add_ports(parser)
    parser.override(
        "--redis",
        "redis.index_url",
        metavar="URL",
        help="index of the replicas that register; `embedded`: none",
    )
    parser.override(
        "--policy",
        "router.default_policy",
        metavar="NAME",
        help=f"how replicas are chosen: {', '.join(sorted(POLICIES))}",
    )
    parser.override(
        "--run-dir", "fleet.run_dir", metavar="DIR", help="where secrets and settings go"
    )
    return parser


def gateway_spec(config: LoadedConfig, run_dir: RunDirectory) -> GatewaySpec:
    """Return the settings of a lone gateway; ConfigError when it would have no replica."""
    router = config.section("router", RouterConfig)
    redis = config.section("redis", RedisConfig)
    index_url = redis.index_url
    if not router.replicas and index_url == EMBEDDED:
        raise ConfigError(
            "a gateway alone needs engines: name them with --replica URL, or the Redis in which "
            "they register with --redis URL"
        )
    run_dir.create()
    secrets = load_or_create_secrets(run_dir)
    return GatewaySpec(
        router=settle_router(config),
        tenants=tuple(config.entries("tenants", TenantConfig)),
        index_url=None if index_url == EMBEDDED else index_url,
        redis=redis,
        fleet_secret=secrets.fleet_secret,
        internal_token=secrets.internal_token,
        admin_key=secrets.admin_key,
        cache_dir=str(run_dir.path / "cache"),
    )


def _announce(spec: GatewaySpec, run_dir: RunDirectory) -> None:
    router = spec.router
    engines = ", ".join(_name(replica) for replica in router.replicas) or "those that register"
    keys = "by API key" if spec.tenants else "without keys (one anonymous tenant)"
    print(
        f"gateway: {url_of(router.host, router.port, tls=router.tls)}/v1 {keys}, in front of "
        f"{engines}\n"
        f"admin:   {url_of(router.admin_host, router.admin_port, tls=router.tls)}, key in "
        f"{run_dir.secrets_file}",
        file=sys.stderr,
        flush=True,
    )


def _name(replica: StaticReplica) -> str:
    return replica.base_url
