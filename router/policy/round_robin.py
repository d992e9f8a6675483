"""`round_robin`: the target that has waited longest for a request gets it.

It looks at neither load nor cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from router.policy.types import Candidate, PlanRequest, ScorePart


class RoundRobin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order targets by their newest placement, oldest first; it has no parameters."""

    name: ClassVar[str] = "round_robin"
    weighs_cache: ClassVar[bool] = False

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        return [float(candidate.last_placed) for candidate in candidates]

    def tolerance(self, best: float) -> float:
        return 0.0

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        return (ScorePart("last_placed", candidate.last_placed),)
