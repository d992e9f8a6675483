"""The flags of `prefixfleet replay …`, and the configuration that they describe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.config_errors import in_words
from kvindex.foundation.errors import ConfigError
from router.policy.planner import PlannerConfig
from sim.baselines.registry import policy_names
from sim.config import (
    GATEWAY_GUARDS,
    Isolation,
    Mode,
    ReplayConfig,
    ViewKind,
)
from sim.latency import PROFILES
from sim.plan_file import PlannedParser
from sim.replay_values import failure_of, tenant_of, window_of
from sim.trace_file import TraceFile
from sim.traces.reading_flags import add_reading
from sim.traces.registry import FORMATS
from sim.traces.trace import Trace

_DEFAULT = ReplayConfig()


def replay_parser(invocation: Invocation, description: str) -> CommandParser:
    """Return a parser with the trace and everything about traffic, router and clock."""
    parser = PlannedParser(invocation, description)
    add_trace(parser)
    _add_traffic(parser)
    _add_router(parser)
    _add_engine(parser)
    return parser


def add_trace(parser: CommandParser) -> None:
    """Add the trace, and what may be stated about it; `trace_file` reads them."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, also .gz, .xz or .zst")
    group = parser.add_argument_group("how the trace is read")
    group.add_argument(
        "--format", choices=FORMATS, help="its format (default: guessed from the first line)"
    )
    group.add_argument(
        "--trace-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens in a block (default: as the file tells)",
    )
    add_reading(group)


def _add_traffic(parser: CommandParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--mode",
        choices=get_args(Mode),
        default=_DEFAULT.mode,
        help="order: no clock; open: by timestamps; closed: a turn follows the answer; "
        "fixed: so many in flight",
    )
    group.add_argument(
        "--in-flight",
        type=int,
        metavar="N",
        help="requests in flight in mode fixed, where it is needed; in mode order those taken as "
        "running (default: one per replica)",
    )
    group.add_argument(
        "--speed-up", type=float, default=1.0, metavar="X", help="play so many times as fast"
    )
    group.add_argument(
        "--jitter", action="store_true", help="spread requests over the trace's clock ticks"
    )
    group.add_argument(
        "--window", metavar="FROM:TO", help="seconds of the trace to play (default: all)"
    )
    group.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="leading part of the requests that is not counted, 0 to 1",
    )
    group.add_argument(
        "--isolation",
        choices=get_args(Isolation),
        default=_DEFAULT.isolation,
        help="who shares cached blocks",
    )
    group.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME:scale=2,weight=1,priority=0,policy=P,param.NAME=V,tokens_per_minute=N",
        help="change one tenant's traffic, rank or limits; may be repeated (default: none)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="equal seeds give equal replays"
    )


def _add_router(parser: CommandParser) -> None:
    group = parser.add_argument_group("routers")
    group.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="routers that share the traffic"
    )
    group.add_argument(
        "--view",
        choices=get_args(ViewKind),
        default="events",
        help="what a router knows of caches: KV events, or its own history",
    )
    group.add_argument(
        "--view-delay",
        type=float,
        default=0.0,
        metavar="MS",
        help="events come so many milliseconds late",
    )
    group.add_argument(
        "--view-loss",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="part of the event batches that is lost, 0 to 1",
    )
    group.add_argument(
        "--own-views", action="store_true", help="each gateway follows the events by itself"
    )
    _add_guards(group)
    group.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="REPLICA:AT:DOWN",
        help="kill a replica at a second, for so many seconds; may be repeated (default: none)",
    )


def _add_guards(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--guards",
        choices=("policy", "gateway"),
        default="policy",
        help="policy: --max-queue-s alone; gateway: fair queue, saturation, siblings and copies "
        "as a gateway has them",
    )
    group.add_argument(
        "--max-queue-s",
        type=float,
        default=_DEFAULT.planner.max_queue_s,
        metavar="SECONDS",
        help="a replica with more prefill than that before it takes nothing",
    )
    group.add_argument(
        "--accept-s",
        type=float,
        metavar="SECONDS",
        help="hold requests in a fair queue until a replica has less (default: by --guards)",
    )
    group.add_argument(
        "--saturation-s",
        type=float,
        metavar="SECONDS",
        help="stay with the prefix once every replica has so much prefill (default: never)",
    )
    group.add_argument(
        "--requests-per-copy",
        type=float,
        metavar="N",
        help="copy a prefix on purpose once it has so many recent requests (default: by --guards)",
    )


def _planner(flags: argparse.Namespace) -> dict[str, Any]:
    guards = GATEWAY_GUARDS if flags.guards == "gateway" else PlannerConfig()
    settings: dict[str, Any] = msgspec.to_builtins(guards)
    settings["max_queue_s"] = flags.max_queue_s
    if flags.accept_s is not None:
        settings["queue"] = {"accept_s": flags.accept_s}
    if flags.saturation_s is not None:
        settings["saturation_s"] = flags.saturation_s
    if flags.requests_per_copy is not None:
        settings["replication"] = {"requests_per_copy": flags.requests_per_copy}
    return settings


def _add_engine(parser: CommandParser) -> None:
    add_latency(parser)
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="tokens in a block of an engine (default: as in the trace)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=_DEFAULT.engine.max_num_seqs,
        metavar="N",
        help="requests in one step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=_DEFAULT.engine.max_num_batched_tokens,
        metavar="TOKENS",
        help="tokens in one step",
    )


def add_latency(parser: CommandParser) -> None:
    """Add the flag of the latency profile."""
    group = parser.add_argument_group("which machine")
    group.add_argument(
        "--latency",
        default=_DEFAULT.latency,
        metavar="NAME|FILE",
        help=f"{', '.join(PROFILES)}, or a file of `replay calibrate`",
    )


def add_one_fleet(parser: CommandParser) -> None:
    """Add the flags of one policy on one fleet."""
    add_one_policy(parser)
    parser.add_argument(
        "--replicas", type=int, default=_DEFAULT.replicas, metavar="N", help="replicas of the fleet"
    )
    parser.add_argument(
        "--blocks", type=int, default=_DEFAULT.blocks, metavar="N", help="blocks of each replica"
    )


def add_one_policy(parser: CommandParser) -> None:
    """Add the flags of one policy."""
    group = parser.add_argument_group("which policy")
    group.add_argument(
        "--policy",
        default=_DEFAULT.policy,
        metavar="NAME",
        help=f"one of {', '.join(policy_names())}",
    )
    group.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the policy; may be repeated (default: its own defaults)",
    )


def trace_file(flags: argparse.Namespace) -> TraceFile:
    """Return the trace by its file, as another process can open it."""
    return TraceFile(
        path=str(flags.trace),
        format=flags.format,
        block_size=flags.trace_block_size,
        tail=flags.tail,
        lengths=flags.lengths,
    )


def open_flagged(flags: argparse.Namespace) -> Trace:
    """Open the trace; what was inferred about it goes to standard error."""
    trace = trace_file(flags).open()
    for note in trace.notes:
        print(f"note: {note}", file=sys.stderr)
    return trace


def read_config(flags: argparse.Namespace, **fleet: Any) -> ReplayConfig:
    """Build the configuration; raise ConfigError naming the flag that cannot be used."""
    settings: dict[str, Any] = {
        "mode": flags.mode,
        "in_flight": flags.in_flight,
        "speed_up": flags.speed_up,
        "jitter": flags.jitter,
        "window": window_of(flags.window),
        "warm_up": flags.warm_up,
        "isolation": flags.isolation,
        "tenants": dict(map(tenant_of, flags.tenant)),
        "seed": flags.seed,
        "gateways": flags.gateways,
        "view": {
            "kind": flags.view,
            "delay_s": flags.view_delay / 1000,
            "loss": flags.view_loss,
            "own": flags.own_views,
        },
        "planner": _planner(flags),
        "failures": [failure_of(text) for text in flags.fail],
        "block_size": flags.block_size,
        "latency": flags.latency,
        "engine": {
            "max_num_seqs": flags.max_num_seqs,
            "max_num_batched_tokens": flags.max_num_batched_tokens,
        },
    }
    return checked({**settings, **fleet})


def checked(settings: dict[str, Any]) -> ReplayConfig:
    """Convert plain settings; raise ConfigError naming the one that cannot be used."""
    try:
        config = msgspec.convert(settings, type=ReplayConfig)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise ConfigError(f"{_flag_of(place.rstrip('`'))}: {in_words(message)}") from None
    for failure in config.failures:
        if failure.replica >= config.replicas:
            last = config.replicas - 1
            raise ConfigError(f"--fail: no replica {failure.replica}; the last one is {last}")
    return config


def _flag_of(place: str) -> str:
    """Return the flag behind a setting: `failures[0].at_s` came from --fail."""
    setting, _, last = place.partition("[")
    if setting in ("failures", "tenants"):
        flag = "--fail" if setting == "failures" else "--tenant"
        return f"{flag}: {last.rpartition('.')[2]}"
    return "--" + place.replace("_", "-").replace("view.", "view-") if place else "replay"
