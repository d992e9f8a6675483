"""`prefix_cost`, the default: the target where serving the request costs least, in seconds.

It weighs cache against load in one unit, so it needs no hit-ratio threshold and no global
imbalance test; guards (draining, breakers, saturation) are the planner's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from router.policy.types import Candidate

NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class PrefixCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Expected seconds to the first token, plus what the placement costs everyone else.

    cost = queued / p + uncached * (1 + work_weight) / p + decode_horizon_tokens * active / d

    p and d are the target's prefill and decode rates. `work_weight` charges recomputed tokens a
    second time, because they also delay whoever queues behind: without it a cold sibling would
    rather recompute a prefix elsewhere than wait for the one that is being computed. The last term
    is the time that a batch of `active` takes to give this request its first tokens. Costs
    within `tie_share` or `tie_s` of the best are equal: measured rates are no better than that.
    """

    name: ClassVar[str] = "prefix_cost"

    work_weight: NonNegative = 1.0
    decode_horizon_tokens: NonNegative = 16.0
    tie_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    tie_s: NonNegative = 0.002

    def score(self, candidate: Candidate) -> float:
        extra_work_s = (
            self.work_weight * candidate.num_uncached_tokens / candidate.prefill_tokens_per_s
        )
        pressure_s = (
            self.decode_horizon_tokens * candidate.num_active / candidate.decode_tokens_per_s
        )
        return candidate.expected_s + extra_work_s + pressure_s

    def tolerance(self, best: float) -> float:
        return max(self.tie_s, self.tie_share * best)
