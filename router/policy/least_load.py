"""`least_load`: the target with the least work gets the request.

It does not look at the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from router.policy.types import Candidate, PlanRequest, ScorePart


class LeastLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Count running requests, and queued prefill in units of `tokens_per_request`."""

    name: ClassVar[str] = "least_load"
    weighs_cache: ClassVar[bool] = False

    tokens_per_request: Annotated[float, msgspec.Meta(gt=0)] = 1024.0

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        return [self.score(candidate) for candidate in candidates]

    def score(self, candidate: Candidate) -> float:
        return candidate.num_active + candidate.queued_prefill_tokens / self.tokens_per_request

    def tolerance(self, best: float) -> float:
        return 0.0

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        return (
            ScorePart("active", candidate.num_active),
            ScorePart("queued", candidate.queued_prefill_tokens / self.tokens_per_request),
        )
