"""What no policy can exceed on a trace, from its reuse alone: the infinite cache and its variants.

Bounds on prompts only: an engine that also caches the blocks that it decodes can exceed them
where the next turn's prompt contains the answer (decode_blocks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from sim.oracle.belady import Belady
from sim.oracle.lru import lru_curve
from sim.oracle.reuse import Namespace, Reuse, reuse_of
from sim.traces.row import TraceRow

NUM_QUARTERS = 4


class CacheHits(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of one cache on a whole trace, cold start.

    Block rates are over `references`, token rates over `input_tokens`; None where there are none.
    A hit in a partial last block counts the tokens that are there. `capped_hit_blocks` leaves at
    least one token of each prompt to compute, as engines do: at most (L - 1) // block_size blocks.
    `block_hit_by_quarter` and `token_hit_last_half` divide the rows, by number, in order.
    """

    references: int
    input_tokens: int
    hit_blocks: int
    hit_tokens: int
    capped_hit_blocks: int
    block_hit: float | None
    token_hit: float | None
    capped_block_hit: float | None
    token_hit_last_half: float | None
    block_hit_by_quarter: tuple[float | None, ...]


class CapacityBound(msgspec.Struct, frozen=True, kw_only=True):
    """Block hits of one pool of `capacity` blocks: LRU, and Belady, which nothing exceeds."""

    capacity: int
    lru_hit_blocks: int
    belady_hit_blocks: int


def infinite_cache(reuse: Reuse) -> CacheHits:
    """Return the hits of a cache that never evicts; O(rows)."""
    return cache_hits(reuse, reuse.num_hit_blocks)


def cache_hits(reuse: Reuse, row_hits: Sequence[int]) -> CacheHits:
    """Summarise the hit blocks of each row, from any cache; O(rows)."""
    size, lengths = reuse.block_size, reuse.input_lengths
    hit_tokens = [min(hits * size, length) for hits, length in zip(row_hits, lengths, strict=True)]
    capped = sum(
        min(hits, max(length - 1, 0) // size)
        for hits, length in zip(row_hits, lengths, strict=True)
    )
    half = _ends(len(row_hits), 2)[1]
    return CacheHits(
        references=reuse.num_references,
        input_tokens=sum(lengths),
        hit_blocks=sum(row_hits),
        hit_tokens=sum(hit_tokens),
        capped_hit_blocks=capped,
        block_hit=share(sum(row_hits), reuse.num_references),
        token_hit=share(sum(hit_tokens), sum(lengths)),
        capped_block_hit=share(capped, reuse.num_references),
        token_hit_last_half=share(sum(hit_tokens[half:]), sum(lengths[half:])),
        block_hit_by_quarter=tuple(
            share(sum(row_hits[quarter]), sum(reuse.num_blocks[quarter]))
            for quarter in _quarters(len(row_hits))
        ),
    )


def infinite_hit_blocks(
    rows: Iterable[TraceRow], *, block_size: int, namespace: Namespace | None = None
) -> tuple[int, ...]:
    """Return the hit blocks of each row in an infinite cache per namespace."""
    return tuple(reuse_of(rows, block_size=block_size, namespace=namespace).num_hit_blocks)


def pooled(reuse: Reuse, *, replicas: int, blocks: int) -> CapacityBound:
    """Return what one pool of all the replicas' blocks would hit, `blocks` of each.

    Belady there bounds every routing and eviction policy of the fleet. LRU there does not: a good
    partition can beat it.
    """
    return capacity_bounds(reuse, [replicas * blocks])[0]


def capacity_bounds(reuse: Reuse, capacities: Iterable[int]) -> tuple[CapacityBound, ...]:
    """Return both curves at the given capacities, in blocks."""
    lru, belady = lru_curve(reuse), Belady(reuse)
    return tuple(
        CapacityBound(
            capacity=capacity,
            lru_hit_blocks=lru.hit_blocks(capacity),
            belady_hit_blocks=belady.hit_blocks(capacity),
        )
        for capacity in capacities
    )


def by_session(row: TraceRow) -> str | int:
    """Namespace of the bound that perfect stickiness can reach; a row without session is alone."""
    return row.line if row.session_id is None else row.session_id


def by_tenant(row: TraceRow) -> str | None:
    """Namespace of full isolation between tenants; rows without a tenant share one."""
    return row.tenant


def share(part: int, whole: int) -> float | None:
    """Return part / whole, None of nothing: an unknown rate is never 0."""
    return part / whole if whole else None


def _quarters(num_rows: int) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(_ends(num_rows, NUM_QUARTERS))]


def _ends(num_rows: int, num_parts: int) -> list[int]:
    """Divide rows so that row i is in part i · num_parts // num_rows."""
    return [-(-num_rows * k // num_parts) for k in range(num_parts + 1)]
