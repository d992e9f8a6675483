"""`prefixfleet index rebuild`: make replicas load a snapshot of their pool into the index anew.

The replicas do it, one after the other; a pool that is rebuilt goes on being matched meanwhile.
"""

from __future__ import annotations

import asyncio
import json

from kvindex.foundation.arguments import Invocation
from kvindex.foundation.config_errors import nearest
from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.registry import ReplicaRecord
from router.launch.http_call import call
from router.launch.index_location import IndexLocation, index_parser, locate, opened_pools
from router.launch.inspect import refusal
from router.launch.table import table

_TIMEOUT_S = 120.0


def rebuild(invocation: Invocation) -> int:
    """Rebuild the named replicas, or all; 1 when any could not."""
    parser = index_parser(invocation, "Make replicas load their snapshot into the index anew.")
    parser.add_argument("id", nargs="*", help="replica ids (default: all of the fleet)")
    flags = parser.read()
    location = locate(invocation, parser, flags)
    records = {record.id: record for record in asyncio.run(_own_replicas(location))}
    for name in flags.id:
        if name not in records:
            raise ConfigError(f"unknown replica {name!r}{nearest(name, records)}")
    token = location.secrets.internal_token
    rows = [_rebuild(records[name], token=token) for name in flags.id or sorted(records)]
    print(json.dumps({"replicas": rows}) if invocation.as_json else table(rows))
    return 0 if rows and all(row["error"] is None for row in rows) else 1


async def _own_replicas(location: IndexLocation) -> list[ReplicaRecord]:
    async with opened_pools(location) as pools:
        return [r for pool in pools for r in pool.replicas if r.kind == "prefixfleet"]


def _rebuild(record: ReplicaRecord, *, token: str) -> dict[str, object]:
    row: dict[str, object] = {"replica": record.id, "blocks": None, "error": None}
    try:
        answer = call(f"{record.url}/kv/rebuild", key=token, method="POST", timeout_s=_TIMEOUT_S)
    except DependencyError as error:
        return row | {"error": str(error)}
    if answer.status == 200 and isinstance(answer.body, dict):
        return row | {"blocks": answer.body.get("num_blocks")}
    return row | {"error": refusal(answer) or f"the replica answered {answer.status}"}
