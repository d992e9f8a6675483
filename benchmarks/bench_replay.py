"""Speed of a replay: requests per second of real time, without a clock and with one.

    python -m benchmarks.bench_replay [--quick] [--json]

The conversation trace at its own 512-token blocks. Order only: the real planner, index and block
pool, one request after the other; beside it the pool alone. Clocked: the real scheduler of eight
replicas, with decode steps taken in one go and, as its own peer, one by one. A replay is one
thread, so processor time is counted, which a busy machine changes least.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.timing import Report, Row, arguments, at_least, machine, show
from sim.cache_replica import CacheReplica
from sim.config import Mode, ReplayConfig
from sim.replay import run_replay
from sim.traces.row import TraceRow
from sim.traces.trace import Trace, open_trace
from sim.workload import Workload

TRACE = Path(__file__).resolve().parents[1] / "tests/fixtures/traces/conversation_trace.jsonl.xz"
NUM_ORDERED = {"quick": 3000, "full": 12_031}
NUM_CLOCKED = {"quick": 600, "full": 3000}
BLOCKS = 4096


def rate(action: Callable[[], object], num_requests: int, *, repeat: int) -> float:
    """Return requests per second of processor time, the best of `repeat` runs."""
    best = float("inf")
    for _ in range(repeat):
        started = time.process_time()
        action()
        best = min(best, time.process_time() - started)
    return num_requests / best


def replay_config(mode: Mode, *, replicas: int, policy: str = "prefix_cost") -> ReplayConfig:
    """Return the fleet that is measured."""
    return ReplayConfig(mode=mode, replicas=replicas, blocks=BLOCKS, policy=policy)


def ordered(trace: Trace, rows: list[TraceRow], *, replicas: int, policy: str) -> float:
    """Return the speed of a whole replay without a clock."""
    config = replay_config("order", replicas=replicas, policy=policy)
    return rate(lambda: run_replay(trace.header, lambda: rows, config), len(rows), repeat=3)


def pool_alone(trace: Trace, rows: list[TraceRow]) -> float:
    """Return the speed of the block pool itself, everything else prepared."""
    arrivals = list(Workload(trace.header, lambda: rows, replay_config("order", replicas=1)))
    size = trace.header.block_size
    assert size is not None, "the trace has blocks"

    def serve() -> None:
        replica = CacheReplica(num_blocks=BLOCKS, block_size=size)
        for arrival in arrivals:
            replica.serve(arrival.hashes, num_prompt_tokens=arrival.num_prompt_tokens)
            replica.take_events()

    return rate(serve, len(rows), repeat=3)


def clocked(trace: Trace, rows: list[TraceRow], *, step_by_step: bool) -> float:
    """Return the speed of a replay in virtual time, eight replicas."""
    config = msgspec.structs.replace(replay_config("open", replicas=8), step_by_step=step_by_step)
    return rate(lambda: run_replay(trace.header, lambda: rows, config), len(rows), repeat=1)


def measure(size: str) -> list[Row]:
    """Measure everything."""
    trace = open_trace(TRACE)
    rows = list(islice(trace.rows(), NUM_ORDERED[size]))
    few = rows[: NUM_CLOCKED[size]]
    found = [
        at_least(
            f"order only, {replicas} replica(s), {policy}",
            ordered(trace, rows, replicas=replicas, policy=policy),
            "/s",
            10_000,
        )
        for replicas, policy in ((1, "round_robin"), (4, "prefix_cost"), (8, "prefix_cost"))
    ]
    alone = Row(name="of which the block pools alone", ours=pool_alone(trace, rows), unit="/s")
    fast = clocked(trace, few, step_by_step=False)
    slow = clocked(trace, few, step_by_step=True)
    timed = at_least("clocked, 8 replicas", fast, "/s", 300)
    timed.peer, timed.ratio = slow, fast / slow
    return [*found, alone, timed]


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    size = "quick" if options.quick else "full"
    report = Report(
        claim="A replay with the real code is fast enough to try policies on a whole trace",
        machine=machine(),
        settings={
            "trace": TRACE.name,
            "ordered": NUM_ORDERED[size],
            "clocked": NUM_CLOCKED[size],
            "blocks": BLOCKS,
            "peer": "the same, every decode step planned by itself",
            "time": "of the processor, one thread",
        },
        rows=measure(size),
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()
