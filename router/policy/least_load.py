"""`least_load`: the target with the least work gets the request.

It does not look at the cache.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from router.policy.types import Candidate


class LeastLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Count running requests, and queued prefill in units of `tokens_per_request`."""

    name: ClassVar[str] = "least_load"

    tokens_per_request: Annotated[float, msgspec.Meta(gt=0)] = 1024.0

    def score(self, candidate: Candidate) -> float:
        return candidate.num_active + candidate.queued_prefill_tokens / self.tokens_per_request

    def tolerance(self, best: float) -> float:
        return 0.0
