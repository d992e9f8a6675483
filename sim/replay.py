"""One replay from a trace and a configuration to its outcomes; the front door of `sim`.

Equal input gives equal output, whatever the process: nothing here reads a clock or a hash seed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from sim.bounds import BoundsReader
from sim.clocked import ClockedReplay
from sim.config import ReplayConfig
from sim.latency import load_latency
from sim.order_only import OrderOnly
from sim.outcomes import Outcomes
from sim.placement import Observer
from sim.report.summary import ReplayReport, counted_from, summarize
from sim.report.traffic import Traffic, describe_traffic
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.trace import Trace
from sim.workload import Workload, block_size_of

RowSource = Callable[[], Iterable[TraceRow]]


def run_replay(
    header: TraceHeader,
    rows: RowSource,
    config: ReplayConfig,
    *,
    observer: Observer | None = None,
) -> Outcomes:
    """Play the rows; `observer` is shown every placement.

    Raises ConfigError for settings that do not fit the trace or each other.
    """
    workload, latency = Workload(header, rows, config), load_latency(config.latency)
    replay: OrderOnly | ClockedReplay
    if config.mode == "order":
        replay = OrderOnly(config, workload, latency, observer=observer)
    else:
        replay = ClockedReplay(config, workload, latency, observer=observer)
    # Nothing here makes cycles that must go early, and looking for them costs a fifth of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return replay.run()
    finally:
        if was_enabled:
            gc.enable()


def read_bounds(header: TraceHeader, rows: RowSource, config: ReplayConfig) -> BoundsReader:
    """Read the bounds of the traffic that `config` replays; they hold for any fleet and policy."""
    workload = Workload(header, rows, config)
    return BoundsReader(workload, block_size=workload.block_size)


def read_traffic(trace: Trace, config: ReplayConfig) -> Traffic:
    """Describe the traffic that `config` replays, whatever the fleet."""
    workload = Workload(trace.header, trace.rows, config)
    return describe_traffic(workload, block_size=workload.block_size)


def report_replay(
    header: TraceHeader,
    rows: RowSource,
    config: ReplayConfig,
    *,
    bounds: BoundsReader | None,
) -> ReplayReport:
    """Play the rows and return the figures."""
    outcomes = run_replay(header, rows, config)
    counted = counted_from(config, outcomes.num_arrivals)
    fleet_bounds = None
    if bounds is not None and outcomes.has_prefix:
        fleet_bounds = bounds.bounds(
            replicas=config.replicas, blocks=config.blocks, counted=counted
        )
    return summarize(
        config,
        outcomes,
        block_size=block_size_of(header, config),
        latency=load_latency(config.latency),
        bounds=fleet_bounds,
    )
