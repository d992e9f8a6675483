"""Measuring a trace: lengths, arrivals, reuse, skew, and the bounds that it sets.

Two passes over the file: what is hot, and whether there are sessions, shows only at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from sim.oracle.belady import Belady
from sim.oracle.bounds import (
    CacheHits,
    by_session,
    by_tenant,
    cache_hits,
    infinite_cache,
    share,
)
from sim.oracle.decode_blocks import OutputReader
from sim.oracle.lru import LruCurve, doubling_capacities, lru_curve
from sim.oracle.reuse import Reuse, ReuseReader
from sim.traces.arrivals import describe_arrivals
from sim.traces.origins import OriginReader
from sim.traces.percentiles import spread, weighted_percentile
from sim.traces.row import TraceRow
from sim.traces.stats import ReuseDistance, Skew, TraceStats
from sim.traces.trace import Trace

NUM_TOP_ROOTS = 5
Watch = Callable[[Iterator[TraceRow]], Iterator[TraceRow]]
DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class _Census:
    """What one pass over the rows counts."""

    def __init__(self, block_size: int | None) -> None:
        self.shared = ReuseReader(block_size=block_size or 1)
        self.output_lengths: list[int] = []
        self.references: Counter[int] = Counter()
        self.roots: Counter[int] = Counter()
        self.branches: Counter[int] = Counter()
        self.session_ids: set[str] = set()
        self.tenant_names: set[str] = set()
        self.has_ids = False
        self.has_outputs = False
        self.num_first_turn_hits = 0
        self.num_first_turn_blocks = 0

    def add(self, row: TraceRow) -> None:
        num_hits = self.shared.add(row)
        ids = row.hash_ids or ()
        self.has_ids |= row.hash_ids is not None
        self.output_lengths.append(row.output_length)
        self.references.update(ids)
        self.roots.update(ids[:1])
        self.branches.update(ids[1:2])
        self.has_outputs |= row.output_hash_ids is not None
        if row.tenant is not None:
            self.tenant_names.add(row.tenant)
        if row.session_id is not None and row.session_id not in self.session_ids:
            self.session_ids.add(row.session_id)
            self.num_first_turn_hits += num_hits
            self.num_first_turn_blocks += len(ids)


def trace_stats(
    trace: Trace, *, capacities: Sequence[int] | None = None, watch: Watch | None = None
) -> TraceStats:
    """Read a trace and describe it; TraceError at the first row that is wrong.

    Without `capacities` the curves double from 16 blocks to one that holds all. `watch` passes
    rows on and may show how many there were; it wraps each of the two passes.
    """
    watched: Watch = (lambda rows: rows) if watch is None else watch
    census = _Census(trace.header.block_size)
    for row in watched(trace.rows()):
        census.add(row)
    reuse = census.shared.reuse
    arrivals = describe_arrivals(reuse.arrivals_s)
    ticks = (arrivals.ticks.sentence(),) if arrivals.ticks is not None else ()
    stats = TraceStats(
        file=str(trace.path),
        format=trace.format_name,
        notes=trace.notes + ticks,
        requests=reuse.num_rows,
        sessions=len(census.session_ids) or None,
        tenants=len(census.tenant_names) or None,
        arrivals=arrivals,
        input_length=spread(reuse.input_lengths),
        output_length=spread(census.output_lengths),
        block_size=trace.header.block_size,
    )
    if trace.header.block_size is None or not census.has_ids:
        return stats
    second = _SecondPass(trace.header.block_size, census)
    for row in watched(trace.rows()):
        second.add(row)
    return _with_curves(second.complete(stats), census, capacities)


class _SecondPass:
    """What can be counted only once it is known what there is: hot blocks, sessions, tenants."""

    def __init__(self, block_size: int, census: _Census) -> None:
        self._origins = OriginReader(
            block_size=block_size,
            references=census.references,
            num_rows=census.shared.reuse.num_rows,
        )
        self._outputs: OutputReader | None = None
        self._sessions: ReuseReader | None = None
        self._tenants: ReuseReader | None = None
        if census.session_ids or census.has_outputs:
            self._outputs = OutputReader(block_size=block_size)
        if census.session_ids:
            self._sessions = ReuseReader(block_size=block_size, namespace=by_session)
        if census.tenant_names:
            self._tenants = ReuseReader(block_size=block_size, namespace=by_tenant)

    def add(self, row: TraceRow) -> None:
        for reader in (self._origins, self._outputs, self._sessions, self._tenants):
            if reader is not None:
                reader.add(row)

    def complete(self, stats: TraceStats) -> TraceStats:
        return msgspec.structs.replace(
            stats,
            origins=self._origins.origins(),
            with_outputs=self._outputs.bound() if self._outputs is not None else None,
            session_bound=_bound(self._sessions),
            tenant_bound=_bound(self._tenants),
        )


def _bound(reader: ReuseReader | None) -> CacheHits | None:
    return None if reader is None else infinite_cache(reader.reuse)


def _with_curves(
    stats: TraceStats, census: _Census, capacities: Sequence[int] | None
) -> TraceStats:
    """Add what follows from the reuse that the first pass found."""
    reuse = census.shared.reuse
    chosen = doubling_capacities(reuse.num_unique_blocks) if capacities is None else capacities
    lru, belady = lru_curve(reuse), Belady(reuse)
    lru_hits = {capacity: cache_hits(reuse, lru.row_hits(capacity)) for capacity in chosen}
    belady_hits = {capacity: cache_hits(reuse, belady.row_hits(capacity)) for capacity in chosen}
    infinite = infinite_cache(reuse)
    return msgspec.structs.replace(
        stats,
        references=reuse.num_references,
        unique_blocks=reuse.num_unique_blocks,
        infinite_hit_blocks=infinite.hit_blocks,
        infinite_hit_tokens=infinite.hit_tokens,
        infinite=infinite,
        lru_curve=_block_hits(lru_hits),
        belady_curve=_block_hits(belady_hits),
        lru=lru_hits,
        belady=belady_hits,
        hits_inside=_hits_inside(reuse),
        reuse_distance=_reuse_distance(reuse, lru),
        skew=_skew(census),
        first_turn_block_hit=share(census.num_first_turn_hits, census.num_first_turn_blocks),
    )


def _block_hits(curve: Mapping[int, CacheHits]) -> dict[int, float | None]:
    return {capacity: hits.block_hit for capacity, hits in curve.items()}


def _hits_inside(reuse: Reuse) -> dict[int, float] | None:
    num_hits = sum(reuse.num_hit_blocks)
    if not num_hits:
        return None
    return {k: sum(min(hits, k) for hits in reuse.num_hit_blocks) / num_hits for k in DEPTHS}


def _reuse_distance(reuse: Reuse, lru: LruCurve) -> ReuseDistance | None:
    if not any(reuse.num_hit_blocks):
        return None
    gaps = sorted(
        (reuse.arrivals_s[index] - reuse.arrivals_s[run.owner], run.num_blocks)
        for index, runs in enumerate(reuse.runs)
        for run in runs
    )
    return ReuseDistance(
        p25=lru.reuse_distance(0.25),
        p50=lru.reuse_distance(0.5),
        p75=lru.reuse_distance(0.75),
        p90=lru.reuse_distance(0.9),
        p99=lru.reuse_distance(0.99),
        max=lru.reuse_distance(1.0),
        gap_s_p50=weighted_percentile(gaps, 0.5),
        gap_s_p90=weighted_percentile(gaps, 0.9),
        gap_s_p99=weighted_percentile(gaps, 0.99),
    )


def _skew(census: _Census) -> Skew:
    counts = sorted(census.references.values(), reverse=True)
    roots = [count for _, count in census.roots.most_common(NUM_TOP_ROOTS)]
    branches = [count for _, count in census.branches.most_common(1)]
    num_references, num_rows = sum(counts), census.shared.reuse.num_rows
    return Skew(
        top_1_percent=share(sum(counts[: len(counts) // 100]), num_references),
        top_10_percent=share(sum(counts[: len(counts) // 10]), num_references),
        referenced_once=share(counts.count(1), len(counts)),
        roots=len(census.roots),
        hottest_root=share(sum(roots[:1]), num_rows),
        top_5_roots=share(sum(roots), num_rows),
        branches=len(census.branches),
        hottest_branch=share(sum(branches), num_rows),
    )
