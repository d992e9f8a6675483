"""The statistics of a trace as a person reads them; what is unknown says so."""

from __future__ import annotations

from sim.oracle.bounds import CacheHits
from sim.traces.percentiles import Spread
from sim.traces.stats import Skew, TraceStats
from sim.traces.text_table import Cell, text_table

_UNKNOWN_HITS = "hits: unknown (the trace has no hash_ids)"


def stats_text(stats: TraceStats) -> str:
    """Return paragraphs and tables, separated by blank lines."""
    parts = [_head(stats), _lengths(stats)]
    if stats.infinite is None:
        return "\n\n".join([*parts, _UNKNOWN_HITS])
    parts += [_bounds(stats, stats.infinite), _quarters(stats.infinite), _curves(stats)]
    if stats.hits_inside is not None:
        parts.append(_depths(stats.hits_inside))
    parts += [_distance(stats), _origins(stats)]
    if stats.skew is not None:
        parts.append(_skew(stats.skew))
    return "\n\n".join(part for part in parts if part)


def _head(stats: TraceStats) -> str:
    arrivals = stats.arrivals
    rate = "" if arrivals.rate_per_s is None else f", {arrivals.rate_per_s:,.2f} requests/s"
    burstiness = "" if arrivals.gap_cv is None else f", gaps vary by {arrivals.gap_cv:.2f} (CV)"
    counts = [f"{stats.requests:,} requests"]
    counts += [f"{stats.sessions:,} sessions"] if stats.sessions else []
    counts += [f"{stats.tenants:,} tenants"] if stats.tenants else []
    lines = [
        stats.file,
        f"{', '.join(counts)} in {arrivals.span_s:,.0f} s{rate}{burstiness}",
        *(f"note: {note}" for note in stats.notes),
    ]
    return "\n".join(lines)


def _lengths(stats: TraceStats) -> str:
    rows = [
        (name, *_spread_cells(lengths))
        for name, lengths in (("input", stats.input_length), ("output", stats.output_length))
        if lengths is not None
    ]
    return text_table(("tokens", "p50", "p90", "p99", "max", "mean"), rows) if rows else ""


def _spread_cells(lengths: Spread) -> tuple[Cell, ...]:
    values = (lengths.p50, lengths.p90, lengths.p99, lengths.max, lengths.mean)
    return tuple(round(value) for value in values)


def _bounds(stats: TraceStats, infinite: CacheHits) -> str:
    head = (
        f"{stats.references:,} references to {stats.unique_blocks:,} blocks of "
        f"{stats.block_size} tokens\ninfinite cache, cold start:"
    )
    bounds = [("all shared", infinite)]
    bounds += [("and answers", stats.with_outputs)] if stats.with_outputs else []
    bounds += [("per session", stats.session_bound)] if stats.session_bound else []
    bounds += [("per tenant", stats.tenant_bound)] if stats.tenant_bound else []
    columns = ("cache", "hit blocks", "block hit", "token hit", "(L-1) cap", "token, last half")
    return f"{head}\n" + text_table(
        columns,
        [
            (
                name,
                bound.hit_blocks,
                bound.block_hit,
                bound.token_hit,
                bound.capped_block_hit,
                bound.token_hit_last_half,
            )
            for name, bound in bounds
        ],
    )


def _quarters(infinite: CacheHits) -> str:
    rates = " ".join(
        "-" if rate is None else f"{rate:.3f}" for rate in infinite.block_hit_by_quarter
    )
    return f"block hit by quarter of the requests: {rates}"


def _curves(stats: TraceStats) -> str:
    lru, belady = stats.lru or {}, stats.belady or {}
    rows = [
        (
            capacity,
            lru[capacity].block_hit,
            belady[capacity].block_hit,
            lru[capacity].token_hit_last_half,
            belady[capacity].token_hit_last_half,
        )
        for capacity in lru
    ]
    columns = ("blocks", "LRU", "Belady", "LRU, warm", "Belady, warm")
    return (
        "one pool: block hit, cold start; warm: token hit of the last half\n"
        f"{text_table(columns, rows)}"
    )


def _depths(hits_inside: dict[int, float]) -> str:
    shown = [f"{k}: {rate:.3f}" for k, rate in hits_inside.items()]
    return f"share of hits inside the first k blocks: {', '.join(shown)}"


def _distance(stats: TraceStats) -> str:
    distance = stats.reuse_distance
    if distance is None:
        return "no block is used twice"
    columns = ("between two uses", "p25", "p50", "p75", "p90", "p99", "max")
    blocks = (distance.p25, distance.p50, distance.p75, distance.p90, distance.p99, distance.max)
    gaps = (distance.gap_s_p50, distance.gap_s_p90, distance.gap_s_p99)
    p50, p90, p99 = (round(gap) for gap in gaps)
    return text_table(columns, [("other blocks", *blocks), ("s", None, p50, None, p90, p99, None)])


def _origins(stats: TraceStats) -> str:
    origins, num_hits = stats.origins, stats.infinite_hit_blocks
    if origins is None or not num_hits:
        return ""
    parts = [
        f"{origins.hot / num_hits:.1%} hot ({origins.hot_blocks:,} blocks)",
        f"{origins.continued / num_hits:.1%} continue an earlier prompt "
        f"({origins.continuing_requests:,} requests)",
        f"{origins.branching / num_hits:.1%} branch off inside one",
    ]
    lines = [f"hits by kind: {', '.join(parts)}"]
    if stats.session_bound is not None:
        same = stats.session_bound.hit_blocks / num_hits
        first = stats.first_turn_block_hit
        lines.append(
            f"hits within the same session: {same:.1%}"
            + ("" if first is None else f"; block hit of first turns: {first:.3f}")
        )
    return "\n".join(lines)


def _skew(skew: Skew) -> str:
    return "\n".join(
        [
            f"skew: the top 1 % of blocks have {_percent(skew.top_1_percent)} of references, the "
            f"top 10 % {_percent(skew.top_10_percent)}; {_percent(skew.referenced_once)} of "
            "blocks are used once",
            f"first blocks: {skew.roots:,}, the hottest in {_percent(skew.hottest_root)} of "
            f"requests, the top 5 in {_percent(skew.top_5_roots)}; second blocks: "
            f"{skew.branches:,}, the hottest in {_percent(skew.hottest_branch)}",
        ]
    )


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
