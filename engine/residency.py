"""How long cached blocks live, lie idle and wait for their next use; one block in 16 is watched.

Whether a larger cache, or a longer memory, would pay is read from these. It decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

AGE_BUCKETS_S = (0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds; a last bucket takes what is older."""

UNWATCHED_BITS = 15
"""A block is watched when its id has none of these bits."""


class AgeCounts(msgspec.Struct, array_like=True):
    """A histogram of seconds: a count per bucket of AGE_BUCKETS_S and beyond, and the sum."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(AGE_BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, age_s: float) -> None:
        """Count one age."""
        self.counts[bisect_left(AGE_BUCKETS_S, age_s)] += 1
        self.total_s += age_s

    def add(self, other: AgeCounts) -> None:
        """Take in what another histogram has counted."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.total_s += other.total_s


class BlockAges(msgspec.Struct, array_like=True):
    """`lifetime`: commit to eviction. `idle`: last use to eviction. `reuse_gap`: use to use."""

    lifetime: AgeCounts = msgspec.field(default_factory=AgeCounts)
    idle: AgeCounts = msgspec.field(default_factory=AgeCounts)
    reuse_gap: AgeCounts = msgspec.field(default_factory=AgeCounts)

    @classmethod
    def sum(cls, parts: Iterable[BlockAges]) -> BlockAges:
        """Add up the ages of several engines."""
        whole = cls()
        for part in parts:
            whole.lifetime.add(part.lifetime)
            whole.idle.add(part.idle)
            whole.reuse_gap.add(part.reuse_gap)
        return whole


@dataclass(slots=True)
class _Watched:
    born_at: float
    rested_at: float


@dataclass(slots=True)
class Residency:
    """Watches a sample of the blocks, see UNWATCHED_BITS; of the rest it must not be told.

    `now`: the instant of the step that is being planned, set by the engine core, in seconds.
    """

    now: float = 0.0
    ages: BlockAges = field(default_factory=BlockAges)
    _watched: dict[int, _Watched] = field(default_factory=dict)

    def committed(self, block_id: int) -> None:
        """Note that contents became findable."""
        self._watched.setdefault(block_id, _Watched(self.now, self.now))

    def rested(self, block_id: int) -> None:
        """Note that the last user has gone."""
        watched = self._watched.get(block_id)
        if watched is not None:
            watched.rested_at = self.now

    def reused(self, block_id: int) -> None:
        """Note that a block that nobody used has a user again."""
        watched = self._watched.get(block_id)
        if watched is not None:
            self.ages.reuse_gap.observe(self.now - watched.rested_at)

    def evicted(self, block_id: int) -> None:
        """Note that the contents are gone."""
        watched = self._watched.pop(block_id, None)
        if watched is not None:
            self.ages.lifetime.observe(self.now - watched.born_at)
            self.ages.idle.observe(self.now - watched.rested_at)

    def discarded(self, block_id: int) -> None:
        """Note that the contents are gone, not for want of room; of any block."""
        self._watched.pop(block_id, None)

    def clear(self) -> None:
        """Forget all blocks: they were not evicted for want of room."""
        self._watched.clear()
