"""Belady's clairvoyant cache: the most hits that any policy can get from one pool of a capacity.

Cold start; a block that was computed may stay out (bypass). What leaves is what is used again
last; of equals, the deepest (Belady, 1966). As in lru.py whole runs move: what the cache keeps for
a future row is a prefix of that row's prompt, so one number per future row is its whole state.
"""

from __future__ import annotations

import heapq

from sim.oracle.reuse import Reuse, Run


class Belady:
    """Belady's hits for one trace at any capacity; the future is worked out once."""

    def __init__(self, reuse: Reuse) -> None:
        """O(runs)."""
        self._next_uses: list[list[Run]] = [[] for _ in reuse.runs]
        for index, runs in enumerate(reuse.runs):
            for run in runs:
                self._next_uses[run.owner].append(Run(index, run.num_blocks))

    def hit_blocks(self, capacity: int) -> int:
        """Return how many block references hit in a cache of `capacity` blocks."""
        return sum(self.row_hits(capacity))

    def row_hits(self, capacity: int) -> list[int]:
        """Return the same for each row; O(runs · log rows)."""
        num_kept = [0] * len(self._next_uses)
        farthest: list[int] = []
        row_hits = []
        num_cached = 0
        for index, next_uses in enumerate(self._next_uses):
            # Every cached block of this prompt is kept for this very row: it is the next one.
            row_hits.append(num_kept[index])
            num_cached -= num_kept[index]
            num_kept[index] = 0
            for row, num_blocks in next_uses:
                if not num_kept[row]:
                    heapq.heappush(farthest, -row)
                num_kept[row] += num_blocks
                num_cached += num_blocks
            while num_cached > capacity:
                row = -farthest[0]
                num_leaving = min(num_kept[row], num_cached - capacity)
                num_kept[row] -= num_leaving
                num_cached -= num_leaving
                if not num_kept[row]:
                    heapq.heappop(farthest)
        return row_hits
