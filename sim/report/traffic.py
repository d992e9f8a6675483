"""What the traffic itself offers to any policy: capacity curve, reuse distance, hot prefixes.

In the engine's blocks and as replayed; the bounds of one fleet are in sim/bounds.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sim.bounds import as_rows
from sim.oracle.bounds import CapacityBound, capacity_bounds
from sim.oracle.lru import doubling_capacities, lru_curve
from sim.oracle.reuse import ReuseReader
from sim.workload import Arrival

NUM_HOT_PREFIXES = 8
_MAX_DEPTH = 64
_SMALLEST_DISTANCE = 16


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """Hits whose block was last used at most so many other blocks ago, and more than half of it."""

    at_most: int
    hits: int


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that many requests begin with, as deep as all of them agree (64 blocks at most)."""

    blocks: int
    requests: int
    share: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a stream of requests."""

    requests: int
    references: int
    capacity_curve: tuple[CapacityBound, ...]
    reuse_distance: tuple[Distance, ...]
    hot_prefixes: tuple[HotPrefix, ...]


class _Node(msgspec.Struct):
    """One of the first blocks of prompts; `most_below` is the count of its commonest child."""

    depth: int
    requests: int = 0
    most_below: int = 0


class _PrefixTree:
    """How many requests begin with each chain of blocks."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._num_requests = 0

    def add(self, hashes: Sequence[bytes]) -> None:
        """Count one request."""
        self._num_requests += 1
        parent: _Node | None = None
        for depth, block in enumerate(hashes, start=1):
            node = self._nodes.get(block)
            if node is None:
                node = self._nodes[block] = _Node(depth)
            node.requests += 1
            if parent is not None:
                parent.most_below = max(parent.most_below, node.requests)
            parent = node

    def hottest(self) -> tuple[HotPrefix, ...]:
        """Return the prefixes that save most; a prefix is as long as all its requests agree."""
        ends = [node for node in self._nodes.values() if node.requests > max(1, node.most_below)]
        ends.sort(key=lambda node: (-node.requests * node.depth, -node.requests))
        return tuple(
            HotPrefix(
                blocks=node.depth,
                requests=node.requests,
                share=node.requests / self._num_requests,
            )
            for node in ends[:NUM_HOT_PREFIXES]
        )


def describe_traffic(arrivals: Iterable[Arrival], *, block_size: int) -> Traffic:
    """Read the stream once; memory per request and distinct block."""
    reader, tree = ReuseReader(block_size=block_size), _PrefixTree()
    for arrival, row in as_rows(arrivals):
        reader.add(row)
        tree.add(arrival.hashes[:_MAX_DEPTH])
    reuse = reader.reuse
    lru = lru_curve(reuse)
    return Traffic(
        requests=reuse.num_rows,
        references=reuse.num_references,
        capacity_curve=capacity_bounds(reuse, doubling_capacities(reuse.num_unique_blocks)),
        reuse_distance=_histogram(lru.hits_at_distance),
        hot_prefixes=tree.hottest(),
    )


def _histogram(hits_at_distance: list[int]) -> tuple[Distance, ...]:
    """Sum the hits between powers of two."""
    found = []
    low, high = 0, _SMALLEST_DISTANCE
    while low < len(hits_at_distance):
        found.append(Distance(at_most=high, hits=sum(hits_at_distance[low : high + 1])))
        low, high = high + 1, high * 2
    return tuple(found)
