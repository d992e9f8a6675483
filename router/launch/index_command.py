"""`prefixfleet index status` and `index watch`: what the index holds, target by target.

They read the registry and the index directly, so they need no gateway, and they change nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from kvindex.foundation.arguments import Invocation
from kvindex.index import TargetState
from router.launch.index_location import (
    IndexLocation,
    PoolView,
    index_parser,
    locate,
    opened_pools,
)
from router.launch.table import table

Row = dict[str, object]

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def status(invocation: Invocation) -> int:
    """Show every pool with its targets; 1 when no replica is registered."""
    parser = index_parser(invocation, "Show what the index holds of each replica.")
    location = locate(invocation, parser, parser.read())
    rows = asyncio.run(_read(location))
    _show(location, rows, invocation)
    return 0 if rows else 1


def watch(invocation: Invocation) -> int:
    """Show the same again and again, until interrupted or `--count` times.

    With --json, one object a line.
    """
    parser = index_parser(invocation, "Show what the index holds, again and again.")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks"
    )
    parser.add_argument(
        "--count", type=int, metavar="N", help="how many looks (default: until interrupted)"
    )
    flags = parser.read()
    location = locate(invocation, parser, flags)
    num_shown = 0
    while True:
        rows = asyncio.run(_read(location))
        if sys.stdout.isatty() and not invocation.as_json:
            print(_CLEAR_SCREEN, end="")
        _show(location, rows, invocation)
        sys.stdout.flush()
        num_shown += 1
        if num_shown == flags.count:
            return 0
        time.sleep(max(flags.interval, 0.1))


async def _read(location: IndexLocation) -> list[Row]:
    async with opened_pools(location) as pools:
        return [_row(pool, state) for pool in pools for state in await pool.index.states()]


def _show(location: IndexLocation, rows: list[Row], invocation: Invocation) -> None:
    if invocation.as_json:
        print(json.dumps({"redis": location.shown_url, "targets": rows}))
    else:
        print(f"index at {location.shown_url}")
        print(table(rows))


def _row(pool: PoolView, state: TargetState) -> Row:
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
