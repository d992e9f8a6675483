"""`power_of_two`: of two targets drawn at random, the one with less work.

It does not look at the cache. The draw is a hash of request and target, so a replay repeats it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from router.policy.types import Candidate, PlanRequest, ScorePart


class PowerOfTwo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Count running requests, and queued prefill in units of `tokens_per_request`."""

    name: ClassVar[str] = "power_of_two"
    weighs_cache: ClassVar[bool] = False

    tokens_per_request: Annotated[float, msgspec.Meta(gt=0)] = 1024.0

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        drawn = sorted(candidates, key=lambda c: _draw(request, c))[:2]
        pair = {candidate.target for candidate in drawn}
        return [self._load(c) if c.target in pair else None for c in candidates]

    def tolerance(self, best: float) -> float:
        return 0.0

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        return (
            ScorePart("active", candidate.num_active),
            ScorePart("queued", candidate.queued_prefill_tokens / self.tokens_per_request),
        )

    def _load(self, candidate: Candidate) -> float:
        return candidate.num_active + candidate.queued_prefill_tokens / self.tokens_per_request


def _draw(request: PlanRequest, candidate: Candidate) -> int:
    return zlib.crc32(f"{request.request_id} {request.attempt} {candidate.target}".encode())
