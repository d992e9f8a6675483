"""`session`: the requests of one session stay together, whatever the cache says.

Rendezvous hashing with bounded loads: each session has an order of the targets, and takes the first
one that is not overloaded, so that a target which comes or goes moves only its own sessions. A
request without a session goes where there is least work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar

import msgspec

from router.policy.types import Candidate, PlanRequest, ScorePart


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A target is overloaded with more than `max_load_factor` times the mean of running requests.

    `min_load` running requests are never too many.
    """

    name: ClassVar[str] = "session"
    weighs_cache: ClassVar[bool] = False

    max_load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    min_load: Annotated[float, msgspec.Meta(ge=0)] = 4.0

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        if request.session is None:
            return [float(candidate.num_active) for candidate in candidates]
        order = sorted(candidates, key=lambda c: _weight(request, c))
        rank = {candidate.target: i for i, candidate in enumerate(order)}
        bound = self.max_load_factor * fmean(c.num_active for c in candidates)
        bound = max(self.min_load, bound)
        return [
            float(rank[c.target] + (len(candidates) if c.num_active > bound else 0))
            for c in candidates
        ]

    def tolerance(self, best: float) -> float:
        return 0.0

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        return (ScorePart("active", candidate.num_active),)


def _weight(request: PlanRequest, candidate: Candidate) -> bytes:
    key = f"{request.tenant} {request.session} {candidate.target}"
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
