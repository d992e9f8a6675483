"""Many replays of one trace: a grid of policies, parameters, fleets and isolation, in processes.

Each process reads the trace for itself, so nothing but small plain values travels. Results come
in the order of the grid, whatever finished first.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from kvindex.foundation.errors import ConfigError
from sim.config import Isolation, ReplayConfig
from sim.replay import read_bounds, report_replay
from sim.report.summary import ReplayReport
from sim.trace_file import TraceFile


class PolicyGrid(msgspec.Struct, frozen=True, kw_only=True):
    """A policy and, by parameter, the values to try."""

    name: str
    params: dict[str, tuple[float, ...]] = {}

    def choices(self) -> list[dict[str, float]]:
        """Return every combination of parameter values."""
        names = list(self.params)
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*self.params.values())
        ]


def grid(
    config: ReplayConfig,
    *,
    policies: Sequence[PolicyGrid],
    replicas: Sequence[int],
    blocks: Sequence[int],
    isolations: Sequence[Isolation],
) -> list[ReplayConfig]:
    """Return one configuration per combination, policies varying fastest."""
    return [
        msgspec.structs.replace(
            config,
            isolation=isolation,
            replicas=num_replicas,
            blocks=num_blocks,
            policy=policy.name,
            params=params,
        )
        for isolation in isolations
        for num_replicas in replicas
        for num_blocks in blocks
        for policy in policies
        for params in policy.choices()
    ]


def run_all(
    file: TraceFile,
    configs: Sequence[ReplayConfig],
    *,
    jobs: int,
    done: Callable[[], None],
) -> list[ReplayReport]:
    """Run every configuration, `jobs` at a time; `done` is called after each.

    The first error ends the search.
    """
    if jobs == 1 or len(configs) == 1:
        reports = []
        for config in configs:
            reports.append(run_one(file, config))
            done()
        return reports
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(configs)), mp_context=context) as pool:
        futures = [pool.submit(run_one, file, config) for config in configs]
        for future in futures:
            future.add_done_callback(lambda _: done())
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_one(file: TraceFile, config: ReplayConfig) -> ReplayReport:
    """Run one configuration, with its bounds."""
    trace = file.open()
    bounds = read_bounds(trace.header, trace.rows, config)
    return report_replay(trace.header, trace.rows, config, bounds=bounds)


def smallest_fleet(
    run: Callable[[int], ReplayReport], *, ttft_p95_s: float, max_shed_rate: float, most: int
) -> tuple[ReplayReport | None, list[ReplayReport]]:
    """Return the report of the fewest replicas that meet a target, and all that were tried.

    Doubles until it is met, then halves the interval: more replicas are taken to be no slower.
    None when even `most` replicas do not meet it.
    """
    tried: list[ReplayReport] = []

    def meets(replicas: int) -> ReplayReport | None:
        report = run(replicas)
        tried.append(report)
        if report.ttft_s is None:
            raise ConfigError("--mode order has no latencies: give --mode open")
        is_met = report.ttft_s.p95 <= ttft_p95_s and report.shed_rate <= max_shed_rate
        return report if is_met else None

    failing, size = 0, 1
    best = meets(size)
    while best is None and size < most:
        failing, size = size, min(most, size * 2)
        best = meets(size)
    while best is not None and best.replicas - failing > 1:
        middle = (failing + best.replicas) // 2
        report = meets(middle)
        if report is None:
            failing = middle
        else:
            best = report
    return best, tried


def default_jobs() -> int:
    """Return how many processes a search uses: one per processor that we may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_policies(words: Iterable[str]) -> list[PolicyGrid]:
    """Read NAME or NAME:PARAM=V|V,PARAM=V words; raise ConfigError for anything else."""
    grids = []
    for word in words:
        name, _, rest = word.partition(":")
        params: dict[str, tuple[float, ...]] = {}
        for part in filter(None, rest.split(",")):
            key, equals, values = part.partition("=")
            try:
                params[key] = tuple(map(float, values.split("|")))
            except ValueError:
                equals = ""
            if not (key and equals):
                raise ConfigError(f"--policy {word!r}: expected NAME:PARAM=VALUE|VALUE,PARAM=…")
        grids.append(PolicyGrid(name=name, params=params))
    return grids
