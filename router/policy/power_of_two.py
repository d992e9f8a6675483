"""`power_of_two`: of two targets drawn at random, the one with less work.

It does not look at the cache. The draw is a hash of request and target, so a replay repeats it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

from router.policy.least_load import LeastLoad
from router.policy.types import Candidate, PlanRequest


class PowerOfTwo(LeastLoad, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`least_load` between the two that are drawn; the others take no part."""

    name: ClassVar[str] = "power_of_two"

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        drawn = sorted(candidates, key=lambda c: _draw(request, c))[:2]
        pair = {candidate.target for candidate in drawn}
        return [self.score(c) if c.target in pair else None for c in candidates]


def _draw(request: PlanRequest, candidate: Candidate) -> int:
    return zlib.crc32(f"{request.request_id} {request.attempt} {candidate.target}".encode())
