"""What a gateway costs: added latency, CPU per request, streams relayed and held, memory.

    python -m benchmarks.bench_gateway [--quick] [--json] [--repeats N] [--model FOLDER]
                                       [--peer NAME=COMMAND ...]

All systems stand before the same two fake engines (fake_engine.py) and get the same bodies from the
same client, phase by phase in turn. COMMAND starts a router, in an environment of its own; in it
`{port}` is the port to listen on, `{engines}` the engines' URLs, `{free_port}` a port for its
metrics. Client, engines and routers share the machine: compare CPU per request, and ratios. A peer
called `bare` is what others are set against: a proxy that only passes on. litellm_proxy.py starts
LiteLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from benchmarks import gateway_fleet as fleet
from benchmarks.demo_folder import demo_folder
from benchmarks.fake_engine import MODEL
from benchmarks.http_load import Load, closed_loop, request_bytes
from benchmarks.timing import Report, Row, at_most, machine, show
from engine.frontend.tokenizer_bundle import load_bundle
from tests.redis_server import running_server, valkey_binary

_PATH = "/v1/chat/completions"
_NUM_BODIES = 2048
_NUM_SHORT, _NUM_LONG, _NUM_HELD = 256, 128, 2000
_PACE_LONG, _PACE_HELD = "pace-20-100", "pace-1000-12"
_HELD_S = 120.0
_BARE = "bare"


@dataclass(slots=True)
class Figures:
    """The figures of one system, one of each repeat."""

    added_p50_us: list[float] = field(default_factory=list)
    added_p99_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us_per_event: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    kb_per_stream: list[float] = field(default_factory=list)
    num_bad: int = 0


@dataclass(frozen=True, slots=True)
class System:
    """Something to measure: a group, and the messages that it gets."""

    name: str
    group: fleet.Group
    messages: Callable[[], list[dict[str, str]]]


def bodies(system: System, *, stream: bool, pace: str | None) -> Iterator[bytes]:
    """Return requests composed beforehand, over and over."""
    fields = {"model": MODEL, "max_tokens": 20, "stream": stream} | ({"user": pace} if pace else {})
    composed = [
        request_bytes(
            system.group.port,
            _PATH,
            msgspec.json.encode({**fields, "messages": system.messages()}),
            key=system.group.key,
        )
        for _ in range(_NUM_BODIES)
    ]
    return itertools.cycle(composed)


async def phase(
    system: System,
    connections: int,
    seconds: float,
    *,
    stream: bool = False,
    pace: str | None = None,
) -> tuple[Load, float]:
    """Load a system; return what came of it, and its CPU time in microseconds."""
    requests = bodies(system, stream=stream, pace=pace)
    before = system.group.cpu_us()
    load = await closed_loop(
        system.group.port, requests, num_connections=connections, seconds=seconds
    )
    return load, system.group.cpu_us() - before


async def measure(system: System, direct: System, figures: Figures, *, seconds: float) -> None:
    """Take the figures of one repeat."""
    base, _ = await phase(direct, 1, seconds)
    alone, _ = await phase(system, 1, seconds)
    many, cpu = await phase(system, 32, 2 * seconds)
    short, _ = await phase(system, _NUM_SHORT, 2 * seconds, stream=True)
    long, long_cpu = await phase(system, _NUM_LONG, 2 * seconds, stream=True, pace=_PACE_LONG)
    loads = (alone, many, short, long)
    bad = sum(load.num_bad for load in loads)
    if bad:
        figures.num_bad += bad
        said = next(load.first_bad for load in loads if load.num_bad)
        print(f"{system.name}: {bad} bad answers, such as {said!r}", file=sys.stderr)
        return
    figures.added_p50_us.append(alone.percentile_us(0.5) - base.percentile_us(0.5))
    figures.added_p99_us.append(alone.percentile_us(0.99) - base.percentile_us(0.99))
    figures.cpu_us.append(cpu / many.num_answers)
    figures.requests_per_s.append(many.num_answers / many.duration_s)
    figures.tokens_per_s.append(short.num_events / short.duration_s)
    figures.cpu_us_per_event.append(long_cpu / long.num_events)
    figures.rss_mb.append(system.group.rss_mb())


async def hold(system: System, figures: Figures) -> None:
    """Hold many slow streams at once; note the memory that each takes, and what failed."""
    before_mb = peak_mb = system.group.rss_mb()
    one_each = itertools.islice(bodies(system, stream=True, pace=_PACE_HELD), _NUM_HELD)
    holding = asyncio.create_task(
        closed_loop(system.group.port, one_each, num_connections=_NUM_HELD, seconds=_HELD_S)
    )
    while not holding.done():
        await asyncio.sleep(0.25)
        peak_mb = max(peak_mb, system.group.rss_mb())
    load = await holding
    figures.num_bad += load.num_bad + _NUM_HELD - load.num_answers
    figures.kb_per_stream.append((peak_mb - before_mb) * 1000 / _NUM_HELD)


GOALS = {
    ("ours, least_load", "added_p50_us"): 500.0,
    ("ours, least_load", "cpu_us"): 300.0,
    ("ours, exact", "added_p50_us"): 1200.0,
    ("ours, exact", "cpu_us"): 900.0,
    ("ours, exact, prefix known", "cpu_us"): 450.0,
}
UNITS = {
    "added_p50_us": ("added at c=1, p50", "us"),
    "added_p99_us": ("added at c=1, p99", "us"),
    "cpu_us": ("CPU per request at c=32", "us"),
    "requests_per_s": ("requests at c=32", "/s"),
    "tokens_per_s": (f"tokens, {_NUM_SHORT} short streams", "/s"),
    "cpu_us_per_event": (f"CPU per token, {_NUM_LONG} long streams", "us"),
    "rss_mb": ("memory after all", "MB"),
    "kb_per_stream": (f"memory per stream, {_NUM_HELD} held", "kB"),
}


def rows(found: dict[str, Figures]) -> list[Row]:
    """Build the rows: medians of the repeats beside those of the bare proxy, and the goals."""
    built, bare = [], found.get(_BARE)
    for system, figures in found.items():
        for name, (words, unit) in UNITS.items():
            values: list[float] = getattr(figures, name)
            if not values:
                continue
            ours, goal = statistics.median(values), GOALS.get((system, name))
            row = at_most(f"{system}: {words}", ours, unit, goal)
            if bare is not None and getattr(bare, name) and system != _BARE:
                row.peer = statistics.median(getattr(bare, name))
                row.ratio = row.ours / row.peer if row.peer > 0 else None
            built.append(row)
        built.append(Row(name=f"{system}: answers other than 200", ours=figures.num_bad, unit=""))
    return built


async def run(options: argparse.Namespace) -> dict[str, Figures]:
    """Start everything, measure in turn, and stop everything."""
    bundle = load_bundle(options.model or demo_folder())
    prompts = fleet.Prompts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pf-bench-")))
        engines, ports = stack.enter_context(fleet.engines(folder, 2))
        redis = stack.enter_context(running_server(valkey_binary()))
        await fleet.register(ports, redis_url=redis.url, bundle=bundle)
        systems = []
        for text in options.peer:
            group = stack.enter_context(fleet.peer(folder, text, ports))
            systems.append(System(group.name, group, prompts.one_turn))
        simple = stack.enter_context(fleet.least_load(folder, ports))
        exact = stack.enter_context(fleet.exact(folder, redis_url=redis.url, bundle=bundle))
        systems += [
            System("ours, least_load", simple, prompts.one_turn),
            System("ours, exact", exact, prompts.one_turn),
            System("ours, exact, prefix known", exact, prompts.next_turn),
        ]
        direct = System("direct", engines, prompts.one_turn)
        found = {system.name: Figures() for system in systems}
        for system in systems:
            await phase(system, 4, 0.5)
        for _ in range(options.repeats):
            for system in systems:
                seconds = 0.5 if options.quick else 2.0
                await measure(system, direct, found[system.name], seconds=seconds)
        for system in [] if options.quick else systems[:-1]:
            await hold(system, found[system.name])
        return found


def main() -> None:
    """Measure and print."""
    parser = fleet.router_flags(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = uvloop.run(run(options))
    report = Report(
        claim="A gateway that tokenizes, matches and accounts costs little",
        machine=machine(),
        settings={"prompt_bytes": 2000, "engines": 2, "repeats": options.repeats},
        rows=rows(found),
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()
