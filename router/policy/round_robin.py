"""`round_robin`: the target that has waited longest for a request gets it.

It looks at neither load nor cache.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from router.policy.types import Candidate


class RoundRobin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order targets by their newest placement, oldest first; it has no parameters."""

    name: ClassVar[str] = "round_robin"

    def score(self, candidate: Candidate) -> float:
        return float(candidate.last_placed)

    def tolerance(self, best: float) -> float:
        return 0.0
