"""`prefix_cost`, the default: the target where serving the request costs least, in seconds.

It weighs cache against load in one unit, so it needs no hit-ratio threshold and no global
imbalance test; guards (draining, breakers, saturation) are the planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from router.policy.types import Candidate, PlanRequest, ScorePart

NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class PrefixCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Expected seconds to the first token, plus what the placement costs everyone else.

    cost = queue + memory + (uncached * (1 + work_weight) + decode_horizon_tokens * active) / p

    p is the target's prefill rate, `queue` and `memory` the seconds that it waits there for the
    prefill of others and for room in the KV cache. `work_weight` charges recomputed tokens a second
    time, because they also delay whoever queues behind: without it a cold sibling would rather
    recompute a prefix elsewhere than wait for the one that is being computed. Each of the `active`
    requests decodes one token with every step; that is the work of one token in each of the next
    `decode_horizon_tokens` steps. (Their rate is no measure: the step of a batch of one takes
    almost as long as that of a batch of thirty.)
    Whoever goes on with a conversation comes again, and its later turns go where this one went. So
    a target that holds less than half of the longest match of any costs `stay_factor` times the
    seconds that it would recompute, `max_stay_s` at most (chosen by replay, docs/routing.md). What
    several conversations begin with does not count for it: that is worth having twice.
    A conversation that is new everywhere costs `start_weight` times its prefill more at a target
    that is spared: while the caches lose conversations just before they come again, all but one
    of the targets are filled more slowly, and keep theirs for longer.
    Costs within `tie_share` or `tie_s` of the best are equal: measured rates are no better than
    that.
    """

    name: ClassVar[str] = "prefix_cost"
    weighs_cache: ClassVar[bool] = True

    work_weight: NonNegative = 1.0
    decode_horizon_tokens: NonNegative = 256.0
    stay_factor: NonNegative = 8.0
    max_stay_s: NonNegative = 8.0
    start_weight: NonNegative = 1.0
    tie_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    tie_s: NonNegative = 0.002

    def scores(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[float | None]:
        longest, charges_s, found = (
            _longest_match(candidates),
            self._charges_s,
            list[float | None](),
        )
        for candidate in candidates:
            extra_work_s, pressure_s, leaving_s, starting_s = charges_s(candidate, longest)
            found.append(candidate.expected_s + extra_work_s + pressure_s + leaving_s + starting_s)
        return found

    def tolerance(self, best: float) -> float:
        return max(self.tie_s, self.tie_share * best)

    def parts(self, candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[ScorePart, ...]:
        longest = _longest_match(candidates)
        extra_work_s, pressure_s, leaving_s, starting_s = self._charges_s(candidate, longest)
        return (
            ScorePart("queue_s", candidate.queue_s),
            ScorePart("memory_s", candidate.memory_s),
            ScorePart("prefill_s", candidate.expected_s - candidate.queue_s - candidate.memory_s),
            ScorePart("extra_work_s", extra_work_s),
            ScorePart("pressure_s", pressure_s),
            ScorePart("leaving_s", leaving_s),
            ScorePart("starting_s", starting_s),
        )

    def _charges_s(self, candidate: Candidate, longest: int) -> tuple[float, float, float, float]:
        """Return the cost beyond the first token: extra work, pressure, leaving, starting.

        Leaving is what it costs later to part from what the others of a conversation need,
        starting what a new conversation takes from those that are kept there.
        """
        rate, uncached = candidate.prefill_tokens_per_s, candidate.num_uncached_tokens
        leaving_s = starting_s = 0.0
        held = candidate.num_reusable_tokens - candidate.num_shared_tokens
        if 2 * held < longest:
            leaving_s = self.stay_factor * ((longest - held) / rate)
            if leaving_s > self.max_stay_s:
                leaving_s = self.max_stay_s
        if candidate.spared and not longest:
            starting_s = self.start_weight * uncached / rate
        return (
            self.work_weight * uncached / rate,
            self.decode_horizon_tokens * candidate.num_active / rate,
            leaving_s,
            starting_s,
        )


def _longest_match(candidates: Sequence[Candidate]) -> int:
    """Return the most tokens held anywhere that only one conversation has."""
    return max([0, *[c.num_reusable_tokens - c.num_shared_tokens for c in candidates]])
