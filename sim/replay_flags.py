"""The flags of `prefixfleet replay …`, and the configuration that they describe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from kvindex.foundation.arguments import CommandParser, Invocation
from kvindex.foundation.errors import ConfigError
from router.config import Limits
from router.policy.planner import PlannerConfig
from sim.baselines.registry import policy_names
from sim.config import (
    GATEWAY_GUARDS,
    Isolation,
    Mode,
    ReplayConfig,
    TenantTraffic,
    ViewKind,
)
from sim.latency import PROFILES
from sim.trace_file import TraceFile
from sim.traces.registry import FORMATS
from sim.traces.row import Lengths, Tail
from sim.traces.trace import Trace

_DEFAULT = ReplayConfig()


def replay_parser(invocation: Invocation, description: str) -> CommandParser:
    """Return a parser with the trace and everything about traffic, router and clock."""
    parser = CommandParser(invocation, description)
    add_trace(parser)
    _add_traffic(parser)
    _add_router(parser)
    _add_engine(parser)
    return parser


def add_trace(parser: CommandParser) -> None:
    """Add the trace, and what may be stated about it; `trace_file` reads them."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, also .gz, .xz or .zst")
    parser.add_argument("--format", choices=FORMATS, help="default: guessed from the first line")
    parser.add_argument(
        "--trace-block-size", type=int, help="tokens, if the file does not tell", metavar="N"
    )
    parser.add_argument(
        "--tail", choices=get_args(Tail), help="whether a partial block of the trace has an id"
    )
    parser.add_argument(
        "--lengths", choices=get_args(Lengths), help="approximate: off by one id is no error"
    )


def _add_traffic(parser: CommandParser) -> None:
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        default=_DEFAULT.mode,
        help="order: no clock; open: by timestamps; closed: a turn follows the answer; "
        "fixed: so many in flight (default %(default)s)",
    )
    parser.add_argument("--in-flight", type=int, metavar="N", help="requests in flight")
    parser.add_argument("--speed-up", type=float, default=1.0, help="play so much faster")
    parser.add_argument(
        "--jitter", action="store_true", help="spread requests over the trace's clock ticks"
    )
    parser.add_argument("--window", metavar="FROM:TO", help="seconds of the trace to play")
    parser.add_argument(
        "--warm-up", type=float, default=0.0, metavar="SHARE", help="leading share not counted"
    )
    parser.add_argument(
        "--isolation",
        choices=get_args(Isolation),
        default=_DEFAULT.isolation,
        help="who shares cached blocks (default %(default)s)",
    )
    parser.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME:scale=2,weight=1,priority=0,policy=P,param.NAME=V,tokens_per_minute=N",
        help="change one tenant's traffic, rank or limits; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal replays")


def _add_router(parser: CommandParser) -> None:
    parser.add_argument("--gateways", type=int, default=1, help="routers that share the traffic")
    parser.add_argument(
        "--view",
        choices=get_args(ViewKind),
        default="events",
        help="what a router knows of caches: KV events, or its own history",
    )
    parser.add_argument(
        "--view-delay", type=float, default=0.0, metavar="MS", help="events come so late"
    )
    parser.add_argument(
        "--view-loss", type=float, default=0.0, metavar="SHARE", help="so many are lost"
    )
    parser.add_argument(
        "--own-views", action="store_true", help="each gateway follows the events by itself"
    )
    _add_guards(parser)
    parser.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="REPLICA:AT:DOWN",
        help="kill a replica at a second of the replay, for so many seconds; may be repeated",
    )


def _add_guards(parser: CommandParser) -> None:
    parser.add_argument(
        "--guards",
        choices=("policy", "gateway"),
        default="policy",
        help="policy: --max-queue-s alone; gateway: fair queue, saturation, siblings and copies "
        "as a gateway has them (default %(default)s)",
    )
    parser.add_argument(
        "--max-queue-s",
        type=float,
        default=_DEFAULT.planner.max_queue_s,
        help="a replica with more prefill than that before it takes nothing (default %(default)s)",
    )
    parser.add_argument(
        "--accept-s", type=float, help="hold requests in a fair queue until a replica has less"
    )
    parser.add_argument(
        "--saturation-s", type=float, help="stay with the prefix once every replica has so much"
    )
    parser.add_argument(
        "--requests-per-copy", type=float, metavar="N", help="copy prefixes so hot on purpose"
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
    parser.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="the engine's (default: the trace's)"
    )
    add_latency(parser)
    parser.add_argument("--max-num-seqs", type=int, default=_DEFAULT.engine.max_num_seqs)
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=_DEFAULT.engine.max_num_batched_tokens
    )


def add_latency(parser: CommandParser) -> None:
    """Add the flag of the latency profile."""
    parser.add_argument(
        "--latency",
        default=_DEFAULT.latency,
        metavar="NAME|FILE",
        help=f"{', '.join(PROFILES)}, or a file of `replay calibrate` (default %(default)s)",
    )


def add_one_fleet(parser: CommandParser) -> None:
    """Add the flags of one policy on one fleet."""
    add_one_policy(parser)
    parser.add_argument("--replicas", type=int, default=_DEFAULT.replicas)
    parser.add_argument("--blocks", type=int, default=_DEFAULT.blocks, help="of each replica")


def add_one_policy(parser: CommandParser) -> None:
    """Add the flags of one policy."""
    parser.add_argument(
        "--policy", default=_DEFAULT.policy, help=f"one of {', '.join(policy_names())}"
    )
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="of the policy"
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
        "window": _window(flags.window),
        "warm_up": flags.warm_up,
        "isolation": flags.isolation,
        "tenants": dict(map(_tenant, flags.tenant)),
        "seed": flags.seed,
        "gateways": flags.gateways,
        "view": {
            "kind": flags.view,
            "delay_s": flags.view_delay / 1000,
            "loss": flags.view_loss,
            "own": flags.own_views,
        },
        "planner": _planner(flags),
        "failures": [_failure(text) for text in flags.fail],
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
        raise ConfigError(f"{_flag_of(place.rstrip('`'))}: {message}") from None
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


def parse_params(words: Sequence[str], flag: str = "--param") -> dict[str, float]:
    """Read NAME=VALUE words; raise ConfigError for anything else."""
    params = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            params[name] = float(value)
        except ValueError:
            raise ConfigError(f"{flag} {word!r}: expected NAME=NUMBER") from None
        if not (name and equals):
            raise ConfigError(f"{flag} {word!r}: expected NAME=NUMBER")
    return params


def whole_numbers(text: str, flag: str) -> list[int]:
    """Read N,N,…; raise ConfigError unless all are at least 1."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"{flag} {text!r}: expected whole numbers from 1, such as 4,8")
    return numbers


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    start, colon, end = text.partition(":")
    try:
        window = (float(start or 0), float(end or "inf"))
    except ValueError:
        window = (0.0, 0.0)
    if not colon or window[0] >= window[1]:
        raise ConfigError(f"--window {text!r}: expected FROM:TO in seconds, FROM before TO")
    return window


_PARAM = "param."
_TENANT_SETTINGS = (
    *(name for name in TenantTraffic.__struct_fields__ if name not in ("limits", "params")),
    *(name for name in Limits.__struct_fields__ if name != "soft_limit"),
)


def _tenant(text: str) -> tuple[str, dict[str, Any]]:
    name, colon, rest = text.partition(":")
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if equals and key.startswith(_PARAM):
            own = parse_params([part.removeprefix(_PARAM)], f"--tenant {text!r}:")
            values.setdefault("params", {}).update(own)
            continue
        if not equals or key not in _TENANT_SETTINGS:
            allowed = ", ".join((*_TENANT_SETTINGS, f"{_PARAM}NAME"))
            raise ConfigError(f"--tenant {text!r}: {part!r} is not one of {allowed} with =VALUE")
        found = value if key == "policy" else _number(value, f"--tenant {text!r}")
        if key in Limits.__struct_fields__:
            values.setdefault("limits", {})[key] = found
        else:
            values[key] = found
    if not (name and colon and values):
        raise ConfigError(f"--tenant {text!r}: expected NAME:scale=2,weight=1,…")
    return name, values


def _number(text: str, place: str) -> float | int:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{place}: {text!r} is not a number") from None
    return int(value) if value.is_integer() else value


def _failure(text: str) -> dict[str, Any]:
    parts = text.split(":")
    try:
        replica, at_s, down_s = int(parts[0]), float(parts[1]), float(parts[2])
    except (ValueError, IndexError):
        raise ConfigError(f"--fail {text!r}: expected REPLICA:AT:DOWN, such as 0:60:30") from None
    return {"replica": replica, "at_s": at_s, "down_s": down_s}
