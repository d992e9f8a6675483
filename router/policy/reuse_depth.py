"""How deep in a cache conversations find their earlier turns: just before these are evicted?

A cache that evicts the least recently used holds what was written since as much as it can hold.
Where its oldest part is found again more than the average one, hits grow faster than the cache, and
equal shares of new work are the worst ones: targets that are filled more slowly find more than the
others lose (a point below the convex hull of the miss curve; Beckmann and Sanchez, Talus, 2015).
Pure counting, in tokens; it knows no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from kvindex.index import Target
from router.policy.types import Candidate, PlanRequest

MAX_PROMPTS = 4096
HALF_LIFE_TURNS = 2.0
"""Counts halve while the caches of all targets are filled anew so many times."""


@dataclass(slots=True)
class ReuseDepth:
    """Follows where prompts end; the longest ago placed of MAX_PROMPTS are forgotten.

    Depth is what has been written at a target since, as far as this gateway had it written;
    with other gateways beside it all looks less deep than it is.
    """

    _newer: float = 0.0
    _oldest: float = 0.0
    _written: dict[Target, int] = field(default_factory=dict)
    # the last block of a prompt -> where it went, and what had been written there by its end
    _ends: OrderedDict[bytes, tuple[Target, int]] = field(default_factory=OrderedDict)

    @property
    def is_deep(self) -> bool:
        """Whether the oldest quarter of the caches is found again more than the average one."""
        return 3 * self._oldest > self._newer

    def placed(self, request: PlanRequest, winner: Candidate, kv_tokens: int | None) -> None:
        """Take in a placement at a target whose cache holds `kv_tokens`, None when unknown."""
        if not kv_tokens or not request.block_size or not request.hashes:
            return
        target, written = winner.target, self._written.get(winner.target, 0)
        num_found = winner.num_cached_tokens - winner.num_shared_tokens
        if num_found > 0:
            end = request.hashes[winner.num_cached_tokens // request.block_size - 1]
            where, before = self._ends.get(end, (None, 0))
            if where == target and 4 * (written - before) < 3 * kv_tokens:
                self._newer += num_found
            elif where == target:
                self._oldest += num_found
        self._written[target] = written = written + winner.num_uncached_tokens
        capacity = kv_tokens * len(self._written)
        left = 0.5 ** (winner.num_uncached_tokens / (HALF_LIFE_TURNS * capacity))
        self._newer *= left
        self._oldest *= left
        self._ends[request.hashes[-1]] = (target, written)
        self._ends.move_to_end(request.hashes[-1])
        if len(self._ends) > MAX_PROMPTS:
            self._ends.popitem(last=False)

    def forget(self, replicas: Collection[str]) -> None:
        """Drop what is remembered of replicas that have left the fleet."""
        for target in [target for target in self._written if target.replica in replicas]:
            del self._written[target]
        for end in [end for end, (where, _) in self._ends.items() if where.replica in replicas]:
            del self._ends[end]
