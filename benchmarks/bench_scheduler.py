"""Cost of the engine's own decisions: a step of the scheduler, a prefix look-up, hashing.

    python -m benchmarks.bench_scheduler [--quick] [--json] [--peer COMMAND]

No model runs: steps are answered with made-up tokens. COMMAND prints one JSON object with the
same workloads measured on vLLM's own scheduler: {"results": {workload: {part: {
"median_us_per_repeat": [...]}}}}. It runs in the same session, in an environment of its own. The
figures are the smallest median of a repeat: the one that neighbours disturbed least.
"""

from __future__ import annotations

import gc
import random
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import msgspec

from benchmarks import scheduler_workloads as workloads
from benchmarks.timing import Report, Row, flags, machine, show

_SEED = 20240601
Figures = dict[str, float]
Measured = Iterable[tuple[str, list[float]]]


class Figure(NamedTuple):
    """One row: where the peer reports it, and its goals: microseconds, and a share of the peer."""

    name: str
    workload: str
    part: str
    limit_us: float | None
    share: float | None = 0.5


FIGURES = (
    Figure("step, 16 running requests", "steady_decode_16", "total", 93.0),
    Figure("step, 256 running requests", "steady_decode_256", "total", 1510.0),
    Figure("step, 1,024 running requests", "steady_decode_1024", "total", 7350.0),
    Figure("step that admits 8k tokens, 7k cached", "steady_admission", "total", 775.0),
    Figure("the same with hashing the prompt", "steady_admission", "with_admission", None),
    Figure("the same, prefix idle before", "steady_admission_idle_prefix", "total", None),
    Figure("step, 256 requests, 70 % of the blocks", "preemption_pressure", "total", None),
    Figure("look-up of 1,000 cached blocks", "prefix_lookup", "lookup", 150.0, None),
    Figure("hashing 8,192 tokens", "block_hashing", "hash_only", 600.0, None),
)


def measure(rng: Callable[[], random.Random], num_steps: int) -> Measured:
    """Run every workload once, each on a new scheduler."""
    for n in (16, 256, 1024):
        decode = partial(workloads.steady_decode, num_requests=n, num_steps=num_steps)
        yield f"steady_decode_{n}/total", decode(rng())
    for name, prefixes, blocks in (
        ("steady_admission", 1, 8192),
        ("steady_admission_idle_prefix", 128, 73728),
    ):
        steps, whole = workloads.steady_admission(
            rng(), num_prefixes=prefixes, num_blocks=blocks, num_steps=num_steps
        )
        yield f"{name}/total", steps
        yield f"{name}/with_admission", whole
    yield (
        "preemption_pressure/total",
        workloads.preemption_pressure(rng(), num_steps=min(300, num_steps * 3 // 2)),
    )
    yield "prefix_lookup/lookup", workloads.prefix_look_up(rng(), repeat=num_steps)
    yield "block_hashing/hash_only", workloads.block_hashing(rng(), repeat=num_steps)


def ours(*, num_repeats: int, num_steps: int) -> Figures:
    """Return the smallest median of each figure, in microseconds."""
    best: Figures = {}
    for repeat in range(num_repeats):
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as the engine-core process does
        for name, samples in measure(partial(random.Random, _SEED + repeat), num_steps):
            best[name] = min(best.get(name, float("inf")), statistics.median(samples))
    return best


def peer(command: str) -> Figures:
    """Run the peer's half; return its figures by the same names."""
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, check=True)
    results = msgspec.json.decode(done.stdout)["results"]
    return {
        f"{workload}/{part}": min(value["median_us_per_repeat"])
        for workload, parts in results.items()
        for part, value in parts.items()
        if isinstance(value, dict) and "median_us_per_repeat" in value
    }


def row(figure: Figure, mine: Figures, theirs: Figures) -> Row:
    """Build a row: the share of the peer is the goal where the peer was measured."""
    key = f"{figure.workload}/{figure.part}"
    cost, other = mine[key], theirs.get(key)
    if other is not None and figure.share is not None:
        goal, met = f"<= {figure.share:g} x", cost <= figure.share * other
    elif figure.limit_us is not None:
        goal, met = f"<= {figure.limit_us:g}", cost <= figure.limit_us
    else:
        return Row(name=figure.name, ours=cost, unit="us", peer=other)
    ratio = None if other is None else cost / other
    return Row(name=figure.name, ours=cost, unit="us", peer=other, ratio=ratio, goal=goal, met=met)


def main() -> None:
    """Measure and print."""
    parser = flags(__doc__ or "")
    parser.add_argument("--peer", metavar="COMMAND", help="prints the peer's figures as JSON")
    options = parser.parse_args()
    num_repeats, num_steps = (1, 60) if options.quick else (5, 200)
    mine = ours(num_repeats=num_repeats, num_steps=num_steps)
    theirs = peer(options.peer) if options.peer else {}
    report = Report(
        claim="The engine decides in microseconds",
        machine=machine(),
        settings={"block_size": 16, "repeats": num_repeats, "steps": num_steps},
        rows=[row(figure, mine, theirs) for figure in FIGURES],
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()
