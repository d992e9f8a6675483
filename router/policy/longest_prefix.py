"""`longest_prefix`, a baseline: the target that holds most of the prompt, however busy it is.

On real traffic it collapses: whoever served the first request of a shared prefix gets them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from router.policy.types import Candidate, PlanRequest, ScorePart


class LongestPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order targets by reusable prompt tokens, most first; it has no parameters."""

    name: ClassVar[str] = "longest_prefix"
    weighs_cache: ClassVar[bool] = True

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        return [-float(candidate.num_reusable_tokens) for candidate in candidates]

    def tolerance(self, best: float) -> float:
        return 0.0

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        return (ScorePart("reusable", -candidate.num_reusable_tokens),)
