"""`prefixfleet index status`: what the index in Redis holds, pool by pool, target by target.

It reads the registry and the index directly, so it needs no gateway, and it changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from kvindex.config import EMBEDDED, RedisConfig
from kvindex.index import TargetState
from kvindex.redis_connect import connect, mask_url
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ReplicaRecord, pool_id
from router.launch.arguments import Invocation
from router.launch.config import load_fleet_config
from router.launch.down import find_run_dir, run_dir_parser
from router.launch.fleet_file import require_running
from router.launch.secrets import load_secrets
from router.launch.table import table


@dataclass(frozen=True, slots=True)
class _Pool:
    id: str
    replicas: list[ReplicaRecord]
    states: list[TargetState]


def status(invocation: Invocation) -> int:
    """Show every pool with its targets; 1 when no replica is registered."""
    parser = run_dir_parser(invocation, "Show what the index holds of each replica.")
    parser.override("--redis", "redis.index_url", help="index to look at, instead of the fleet's")
    overrides = parser.overrides(parser.read())
    run_dir = find_run_dir(invocation, overrides)
    config = load_fleet_config(invocation.config_file, overrides, demo=True)
    redis = config.section("redis", RedisConfig)
    url = require_running(run_dir).redis.url if redis.index_url == EMBEDDED else redis.index_url
    secret = load_secrets(run_dir).fleet_secret.encode()
    pools = asyncio.run(_read(url, redis, secret))
    rows = [_row(pool, state) for pool in pools for state in pool.states]
    if invocation.as_json:
        print(json.dumps({"redis": mask_url(url), "targets": rows}))
    else:
        print(f"index at {mask_url(url)}")
        print(table(rows))
    return 0 if rows else 1


async def _read(url: str, config: RedisConfig, secret: bytes) -> list[_Pool]:
    client = connect(url, config)
    try:
        records = await RedisRegistry(client, secret).records()
        by_pool: dict[str, list[ReplicaRecord]] = {}
        for record in records:
            name = pool_id(record.served_models[0], record.identity, record.hash_scheme)
            by_pool.setdefault(name, []).append(record)
        return [
            _Pool(name, replicas, await RedisIndex(client, name).states())
            for name, replicas in by_pool.items()
        ]
    finally:
        await client.aclose()


def _row(pool: _Pool, state: TargetState) -> dict[str, object]:
    model = next((r.served_models[0] for r in pool.replicas if r.id == state.target.replica), None)
    return {
        "pool": pool.id,
        "model": model,
        "target": str(state.target),
        "mode": state.report.mode,
        "epoch": state.epoch,
        "applied seq": state.applied_seq,
        "blocks": sum(state.num_blocks.values()),
        "lease left s": state.lease_left_s,
        "reason": state.report.reason or None,
    }
