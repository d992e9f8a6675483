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
    # prefix -> its blocks, of those that were shared at some time; few, so that looking is quick
    _once_shared: dict[bytes, int] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)  # of these, each once, the longest first

    def touch(self, prefix: bytes, num_blocks: int, now: float) -> float:
        """Count a placement that found a prefix and no more of its prompt; return the heat."""
        heat = self._heat.get(prefix)
        if heat is None:
            heat = self._heat[prefix] = _Heat(0.0, now)
            if len(self._heat) > MAX_PREFIXES:
                forgotten, _ = self._heat.popitem(last=False)
                if self._once_shared.pop(forgotten, None) is not None:
                    self._list_lengths()
        else:
            self._heat.move_to_end(prefix)
        heat.count = self._left(heat, now) + 1.0
        heat.at = now
        if heat.count >= SHARED_BY and prefix not in self._once_shared:
            self._once_shared[prefix] = num_blocks
            self._list_lengths()
        return heat.count

    def num_shared_blocks(self, hashes: Sequence[bytes], longest: int, now: float) -> int:
        """Return how many of the first `longest` blocks several conversations begin with.

        O(distinct lengths of shared prefixes), however long the prompt.
        """
        for length in self._lengths:
            prefix = hashes[length - 1] if length <= longest else b""
            if prefix in self._once_shared and self._left(self._heat[prefix], now) >= SHARED_BY:
                return length
        return 0

    def _list_lengths(self) -> None:
        self._lengths = sorted(set(self._once_shared.values()), reverse=True)

    def _left(self, heat: _Heat, now: float) -> float:
        return float(heat.count * 2.0 ** -((now - heat.at) / self.half_life_s))
