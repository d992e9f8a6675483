"""The LRU hit count at every capacity at once, from one pass over stack distances.

One pool, cold start. A request first counts its hits, then touches its blocks, the last one
first, then the least recently used leave. A block hits at a capacity if that is at least its
stack distance: the number of distinct blocks used since, itself included (Mattson et al., 1970).
The stack lists rows by age, and of each row the blocks that no later row used, a suffix of its
prompt; so the blocks of a run have consecutive distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sim.oracle.reuse import Reuse

SMALLEST_CAPACITY = 16


@dataclass(frozen=True, slots=True)
class LruCurve:
    """`hits_at_distance[d]` counts the hits that need exactly d blocks of capacity.

    `num_newer[i]` has for each run of row i how many blocks are nearer than its first.
    """

    hits_at_distance: list[int]
    num_newer: list[tuple[int, ...]]
    reuse: Reuse

    def hit_blocks(self, capacity: int) -> int:
        """Return how many block references hit in a cache of `capacity` blocks; O(capacity)."""
        return sum(self.hits_at_distance[: capacity + 1])

    def row_hits(self, capacity: int) -> list[int]:
        """Return the same for each row; O(runs)."""
        return [
            sum(
                min(run.num_blocks, max(capacity - newer, 0))
                for run, newer in zip(runs, distances, strict=True)
            )
            for runs, distances in zip(self.reuse.runs, self.num_newer, strict=True)
        ]

    def reuse_distance(self, q: float) -> int:
        """Return how many other blocks were used since, at rank int(n · q) of all n hits.

        q = 1 gives the longest. Raises ValueError when nothing hits.
        """
        num_hits = sum(self.hits_at_distance)
        if not num_hits:
            raise ValueError("no block is used twice")
        rank = min(int(num_hits * q), num_hits - 1)
        sums = accumulate(self.hits_at_distance)
        return next(distance for distance, so_far in enumerate(sums) if so_far > rank) - 1


def lru_curve(reuse: Reuse) -> LruCurve:
    """Return the curve of a trace; O(runs · log rows + references in the deepest stack)."""
    stack = _RowStack(reuse.num_rows)
    # Distances of a run are consecutive: mark both ends, add up at the end.
    changes = [0] * (reuse.num_unique_blocks + 2)
    num_newer = []
    for index, runs in enumerate(reuse.runs):
        num_newer.append(tuple(stack.num_newer(run.owner) for run in runs))
        # Hits are counted before anything is touched, hence a loop of its own.
        for run, newer in zip(runs, num_newer[-1], strict=True):
            changes[newer + 1] += 1
            changes[newer + run.num_blocks + 1] -= 1
            stack.add(run.owner, -run.num_blocks)
        stack.add(index, reuse.num_blocks[index])
    return LruCurve(list(accumulate(changes)), num_newer, reuse)


class _RowStack:
    """How many blocks of the LRU stack belong to each row: a Fenwick tree over rows."""

    def __init__(self, num_rows: int) -> None:
        self._tree = [0] * (num_rows + 1)
        self._total = 0

    def add(self, row: int, num_blocks: int) -> None:
        self._total += num_blocks
        tree, node = self._tree, row + 1
        while node < len(tree):
            tree[node] += num_blocks
            node += node & -node

    def num_newer(self, row: int) -> int:
        """Count the blocks of all rows after `row`; O(log rows)."""
        tree, node, num_not_newer = self._tree, row + 1, 0
        while node:
            num_not_newer += tree[node]
            node -= node & -node
        return self._total - num_not_newer


def doubling_capacities(num_unique_blocks: int, *, first: int = SMALLEST_CAPACITY) -> list[int]:
    """Return capacities in blocks, each twice the one before, the last of which holds all."""
    capacities = [first]
    while capacities[-1] < num_unique_blocks:
        capacities.append(2 * capacities[-1])
    return capacities
