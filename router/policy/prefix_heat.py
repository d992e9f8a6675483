"""How many placements have lately found just this much of their prompts: heat by prefix.

A prefix is named by the hash of its last block. What ends there often is what many prompts begin
with, such as a system prompt; what one conversation alone continues is hot nowhere. Pure; instants
are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PREFIXES = 4096
HALF_LIFE_S = 60.0
SHARED_BY = 3.0
"""A prefix at which so many placements have parted lately belongs to no one conversation."""


@dataclass(slots=True)
class _Heat:
    count: float
    at: float


@dataclass(slots=True)
class PrefixHeat:
    """Counts that halve every `half_life_s` seconds; the longest untouched ones are forgotten."""

    half_life_s: float = HALF_LIFE_S
    _heat: OrderedDict[bytes, _Heat] = field(default_factory=OrderedDict)

    def touch(self, prefix: bytes, now: float) -> float:
        """Count a placement that found a prefix and no more of its prompt; return the heat."""
        heat = self._heat.setdefault(prefix, _Heat(0.0, now))
        self._heat.move_to_end(prefix)
        heat.count = self._left(heat, now) + 1.0
        heat.at = now
        if len(self._heat) > MAX_PREFIXES:
            self._heat.popitem(last=False)
        return heat.count

    def num_shared_blocks(self, hashes: Sequence[bytes], now: float) -> int:
        """Return how many of these leading blocks are what several conversations begin with."""
        for position in range(len(hashes), 0, -1):
            heat = self._heat.get(hashes[position - 1])
            if heat is not None and self._left(heat, now) >= SHARED_BY:
                return position
        return 0

    def _left(self, heat: _Heat, now: float) -> float:
        return float(heat.count * 2.0 ** -((now - heat.at) / self.half_life_s))
