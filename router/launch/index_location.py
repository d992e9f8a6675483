"""Where the index of a fleet is and who is in it, for every `prefixfleet index` command.

It reads the configuration, the run directory and the registry; it asks no gateway.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from redis.asyncio import Redis

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.redis_connect import connect, mask_url
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ReplicaRecord, pool_id
from router.launch.config import load_fleet_config
from router.launch.down import find_run_dir, run_dir_parser
from router.launch.fleet_file import require_running
from router.launch.secrets import FleetSecrets, load_secrets, shared_secrets


class IndexLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The store of the index and the secrets of its fleet."""

    url: str
    redis: RedisConfig
    secrets: FleetSecrets

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return mask_url(self.url)


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, its replicas and its index; the index is usable while the location is open."""

    id: str
    replicas: list[ReplicaRecord]
    index: RedisIndex


def index_parser(invocation: Invocation, description: str) -> CommandParser:
    """Return a parser for commands that look into the index itself."""
    parser = run_dir_parser(invocation, description)
    parser.override(
        "--redis",
        "redis.index_url",
        group=parser.add_argument_group("which index"),
        metavar="URL",
        help="its Redis; `embedded` is that of the fleet that runs",
    )
    return parser


def locate(
    invocation: Invocation, parser: CommandParser, flags: argparse.Namespace
) -> IndexLocation:
    """Find the index; raise ConfigError or DependencyError saying what is missing."""
    overrides = parser.overrides(flags)
    run_dir = find_run_dir(invocation, overrides)
    config = load_fleet_config(invocation.config_file, overrides, demo=True)
    redis = config.section("redis", RedisConfig)
    url = require_running(run_dir).redis.url if redis.index_url == EMBEDDED else redis.index_url
    secrets = shared_secrets() or load_secrets(run_dir)
    return IndexLocation(url=url, redis=redis, secrets=secrets)


@asynccontextmanager
async def opened_pools(location: IndexLocation) -> AsyncIterator[list[PoolView]]:
    """Yield the pools of the registered replicas, by id; their indexes are closed at the end."""
    client: Redis = connect(location.url, location.redis)
    try:
        registry = RedisRegistry(client, location.secrets.fleet_secret.encode())
        by_pool: dict[str, list[ReplicaRecord]] = {}
        for record in await registry.records():
            name = pool_id(record.served_models[0], record.identity, record.hash_scheme)
            by_pool.setdefault(name, []).append(record)
        yield [
            PoolView(id=name, replicas=replicas, index=RedisIndex(client, name))
            for name, replicas in sorted(by_pool.items())
        ]
    finally:
        await client.aclose()
