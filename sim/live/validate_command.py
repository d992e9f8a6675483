"""`prefixfleet replay validate`: flags in, a live fleet driven, its replay compared."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from pathlib import Path

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError
from sim.latency import load_latency
from sim.live.client import connected
from sim.live.compare import BY_THE_CLOCK, ONE_BY_ONE, Tolerance
from sim.live.fleet_settings import KEY_VARIABLE, FleetAddress, find_fleet, read_settings
from sim.live.prompts import DEFAULT_VOCAB_SIZE
from sim.live.shrink import shrunk_header, shrunk_rows
from sim.live.validate_text import validation_text
from sim.live.validation import Plan, Validation, validate
from sim.progress import progress_bar
from sim.replay_flags import add_latency, add_trace, open_flagged
from sim.replay_values import parse_params
from sim.traces.row import TraceHeader, TraceRow

ADMIN_KEY_VARIABLE = "PREFIXFLEET_ADMIN_KEY"


def run(invocation: Invocation) -> int:
    """Drive the live fleet with a trace and compare; 1 when the replay is over tolerance."""
    flags = _parser(invocation).read()
    settings = read_settings(invocation.config_file)
    address = find_fleet(
        flags.run_dir or settings.run_dir,
        url=flags.url,
        key=flags.key or os.environ.get(KEY_VARIABLE),
        admin_url=flags.admin_url,
        admin_key=flags.admin_key or os.environ.get(ADMIN_KEY_VARIABLE),
        ca=flags.ca,
    )
    plan = _plan(flags, _usual_tolerance(address, open_loop=flags.open_loop))
    header, rows = _rows(flags)

    async def main() -> Validation:
        with progress_bar("requests", len(rows)) as done:
            async with connected(address) as client:
                return await validate(
                    client, header, rows, settings, plan, trace=str(flags.trace), done=done
                )

    report = asyncio.run(main())
    if invocation.as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(validation_text(report))
    return 1 if report.comparison.exceeded else 0


def _parser(invocation: Invocation) -> CommandParser:
    parser = CommandParser(
        invocation,
        "Send a trace to a live fleet and to its replay, and compare request by request. "
        "Empties the fleet's prefix caches first.",
    )
    add_trace(parser)
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first so many requests (default: all)"
    )
    parser.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="make blocks and lengths N times smaller"
    )
    _add_fleet(parser)
    parser.add_argument(
        "--concurrency", type=int, choices=(1,), default=1, help="requests at a time"
    )
    parser.add_argument(
        "--open-loop", action="store_true", help="send by the trace's clock instead"
    )
    parser.add_argument(
        "--speed-up", type=float, default=1.0, metavar="X", help="play so many times as fast"
    )
    add_latency(parser)
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=DEFAULT_VOCAB_SIZE,
        metavar="N",
        help="prompts are of token ids below this",
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="how far they may differ: cached or replica (share that must be equal), hit "
        "(points), ttft (share); may be repeated (default: what is expected of the way of sending)",
    )
    return parser


def _add_fleet(parser: CommandParser) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="run directory of the fleet (default: as configured)",
    )
    parser.add_argument("--url", help="the gateway's (default: that of the run directory)")
    parser.add_argument(
        "--ca", metavar="FILE", help="authorities for an https URL (default: the system's)"
    )
    parser.add_argument(
        "--key", metavar="KEY", help=f"an API key (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument(
        "--admin-url", metavar="URL", help="its admin API (default: compare no weighing)"
    )
    parser.add_argument(
        "--admin-key", metavar="KEY", help=f"its key (default: the variable {ADMIN_KEY_VARIABLE})"
    )
    parser.add_argument("--model", metavar="NAME", help="served model (default: the only one)")
    parser.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help="blocks of each replica (default: as it says itself)",
    )


def _usual_tolerance(address: FleetAddress, *, open_loop: bool) -> Tolerance:
    """Return what holds without `--tolerance`; without an admin API the choices are not tested."""
    if address.admin_url is None:
        return Tolerance(hit=1.0)
    return BY_THE_CLOCK if open_loop else ONE_BY_ONE


def _plan(flags: argparse.Namespace, usual: Tolerance) -> Plan:
    load_latency(flags.latency)  # A wrong name is told before anything is sent.
    if flags.speed_up <= 0:
        raise ConfigError(f"--speed-up {flags.speed_up:g}: expected more than 0")
    if flags.vocab_size < 2:
        raise ConfigError(f"--vocab-size {flags.vocab_size}: expected 2 or more")
    given = parse_params(flags.tolerance, "--tolerance")
    try:
        tolerance = msgspec.convert(msgspec.structs.asdict(usual) | given, type=Tolerance)
    except msgspec.ValidationError:
        names = ", ".join(Tolerance.__struct_fields__)
        raise ConfigError(f"--tolerance {' '.join(flags.tolerance)}: names are {names}") from None
    return Plan(
        open_loop=flags.open_loop,
        speed_up=flags.speed_up,
        vocab_size=flags.vocab_size,
        latency=flags.latency,
        model=flags.model,
        blocks=flags.blocks,
        tolerance=tolerance,
    )


def _rows(flags: argparse.Namespace) -> tuple[TraceHeader, list[TraceRow]]:
    trace = open_flagged(flags)
    header, rows = trace.header, trace.rows()
    if flags.shrink != 1:
        rows = shrunk_rows(rows, header, flags.shrink)
        header = shrunk_header(header, flags.shrink)
    taken = list(itertools.islice(rows, flags.limit))
    if not taken:
        raise ConfigError(f"{flags.trace}: no request to send")
    return header, taken
