"""What is reported of a trace: plain values, as JSON and as text (stats_text.py).

How they are measured is measure.py. Whatever needs hash_ids is None for a trace without them:
unknown, never 0.
"""

from __future__ import annotations

import msgspec

from sim.oracle.bounds import CacheHits
from sim.traces.arrivals import Arrivals
from sim.traces.origins import HitOrigins
from sim.traces.percentiles import Spread


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How unequal blocks and prefixes are; shares of references, blocks and requests.

    A root is a prompt's first block, a branch its second: where one root is common to nearly all,
    branches tell the prefixes apart.
    """

    top_1_percent: float | None
    top_10_percent: float | None
    referenced_once: float | None
    roots: int
    hottest_root: float | None
    top_5_roots: float | None
    branches: int
    hottest_branch: float | None


class ReuseDistance(msgspec.Struct, frozen=True, kw_only=True):
    """Different blocks used between two uses of a block, over all hits; and the time between."""

    p25: int
    p50: int
    p75: int
    p90: int
    p99: int
    max: int
    gap_s_p50: float
    gap_s_p90: float
    gap_s_p99: float


class TraceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `prefixfleet trace stats` reports.

    Curves map a capacity in blocks to the share of block references that hit in one pool, cold
    start; `lru` and `belady` have all that is known of those hits. `with_outputs` is an infinite
    cache that also keeps the blocks which answers fill; `session_bound` and `tenant_bound` are
    infinite caches that sessions or tenants do not share. `hits_inside` maps k to the share of
    hits within the first k blocks of their prompts.
    """

    file: str
    format: str
    notes: tuple[str, ...]
    requests: int
    sessions: int | None
    tenants: int | None
    arrivals: Arrivals
    input_length: Spread | None
    output_length: Spread | None
    block_size: int | None
    references: int | None = None
    unique_blocks: int | None = None
    infinite_hit_blocks: int | None = None
    infinite_hit_tokens: int | None = None
    infinite: CacheHits | None = None
    with_outputs: CacheHits | None = None
    session_bound: CacheHits | None = None
    tenant_bound: CacheHits | None = None
    lru_curve: dict[int, float | None] | None = None
    belady_curve: dict[int, float | None] | None = None
    lru: dict[int, CacheHits] | None = None
    belady: dict[int, CacheHits] | None = None
    hits_inside: dict[int, float] | None = None
    reuse_distance: ReuseDistance | None = None
    skew: Skew | None = None
    origins: HitOrigins | None = None
    first_turn_block_hit: float | None = None
