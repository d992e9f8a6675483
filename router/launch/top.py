"""`prefixfleet top`: replicas, tenants and the newest decisions at a glance, in a terminal.

The same look at the fleet as the dashboard's; it asks a gateway's admin API and changes nothing.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvindex.foundation.arguments import Invocation
from kvindex.foundation.errors import ConfigError
from router.launch.inspect import admin_parser, ask

_PATH = "/admin/live?once=true"
_DECISIONS = 12
_UNCUT = 1000
_MODE_STYLES = {"EXACT": "green", "DEGRADED": "yellow", "FALLBACK": "red"}


def top(invocation: Invocation) -> int:
    """Show the fleet again and again until interrupted; once, when it is no terminal."""
    parser = admin_parser(invocation, "Watch replicas, tenants and the newest decisions.")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="time between two looks"
    )
    parser.add_argument("--once", action="store_true", help="print one look and end")
    flags = parser.read()
    if not flags.every > 0:
        raise ConfigError(f"--every {flags.every:g}: expected more than 0")

    def look() -> dict[str, Any]:
        state: dict[str, Any] = ask(invocation, parser, flags, _PATH).body
        return state

    if invocation.as_json:
        print(json.dumps(look()))
        return 0
    if not sys.stdout.isatty():
        # A file or a pipe has no edge: no line is cut.
        Console(width=_UNCUT).print(screen(look()))
        return 0
    console = Console()
    if flags.once:
        console.print(screen(look()))
        return 0
    with Live(screen(look()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(flags.every)
            live.update(screen(look()), refresh=True)


def screen(state: dict[str, Any]) -> Group:
    """Lay out one look at the fleet."""
    live = sum(replica["live"] for replica in state["replicas"])
    head = (
        f"{live} of {len(state['replicas'])} replicas live, {state['num_in_flight']} requests in "
        f"flight, {state['num_waiting']} waiting"
    )
    if state["index_reason"]:
        head += f"; index: {state['index_reason']}"
    return Group(
        Text(head),
        _replicas(state["replicas"]),
        _tenants(state["tenants"], state["num_tenants"]),
        _decisions(state["decisions"]),
    )


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = _table("replica", "mode", right=("requests", "running", "waiting", "blocks", "tok/s"))
    for replica in replicas:
        mode = replica["mode"] if replica["live"] else "not live"
        blocks, report = replica["num_blocks"] or {}, replica["report"]
        table.add_row(
            Text(replica["id"]),
            Text(mode, style=_MODE_STYLES.get(mode, "red")),
            _number(replica["num_active"]),
            _number(report["num_running"]),
            _number(report["num_waiting"]),
            f"{_number(sum(blocks.values()))} / {_number(replica['max_blocks'])}",
            _number(report["prefill_tokens_per_s"]),
        )
    return table


def _tenants(tenants: list[dict[str, Any]], num_tenants: int) -> Table:
    table = _table("tenant", right=("requests", "429", "prompt", "cached", "charged"))
    if num_tenants > len(tenants):
        table.caption = f"the first {len(tenants)} of {num_tenants}; `tenant list` has all"
    for tenant in tenants:
        table.add_row(
            Text(tenant["name"]),
            _number(tenant["requests"]),
            _number(tenant["refused"]),
            _number(tenant["prompt_tokens"]),
            _number(tenant["realised_tokens"]),
            _number(tenant["charged_tokens"]),
        )
    return table


def _decisions(decisions: list[dict[str, Any]]) -> Table:
    table = _table(
        "time", "request", "tenant", "replica", right=("status", "prompt", "cached", "TTFT")
    )
    for record in reversed(decisions[-_DECISIONS:]):
        usage = record["usage"] or {}
        ttft_s = record["ttft_s"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(record["at"])),
            Text(record["request_id"]),
            Text(record["tenant"]),
            Text(_replica_of(record)),
            str(record["status"]),
            _number(record["num_prompt_tokens"]),
            _number(usage.get("cached_tokens")),
            "–" if ttft_s is None else f"{ttft_s:.3f} s",
        )
    return table


def _replica_of(record: dict[str, Any]) -> str:
    placed = [a["decision"] for a in record["attempts"] if a["decision"]["type"] == "place"]
    return str(placed[-1]["winner"]["target"]["replica"]) if placed else "–"


def _table(*left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for head in left:
        table.add_column(head, no_wrap=True)
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{round(value):,}"
