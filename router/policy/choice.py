"""From scored candidates to the winner: the last step of a placement, and all that a replay needs.

It knows neither guards nor what is running; equal candidates give equal winners.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from kvindex.index import Target
from router.policy.types import Candidate, Place, PlanRequest, Policy, Rule


def scored(
    policy: Policy, request: PlanRequest, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the candidates with the policy's scores."""
    replace, scores = msgspec.structs.replace, policy.scores(request, candidates)
    return [
        replace(candidate, score=score) for candidate, score in zip(candidates, scores, strict=True)
    ]


def choose(
    candidates: Sequence[Candidate], policy: Policy, *, rule: Rule, gateway: str
) -> Candidate:
    """Take the best of scored candidates; ties go by `tie_order`.

    Rule `affinity` compares what would have to be computed, not scores.
    """
    ratings = [float(c.num_uncached_tokens) if rule == "affinity" else c.score for c in candidates]
    best = min([rating for rating in ratings if rating is not None])
    limit = best + (policy.tolerance(best) if rule != "affinity" else 0.0)
    ties = [
        candidate
        for candidate, rating in zip(candidates, ratings, strict=True)
        if rating is not None and rating <= limit
    ]
    if len(ties) == 1:
        return ties[0]
    return min(ties, key=lambda candidate: tie_order(candidate, gateway))


def tie_order(candidate: Candidate, gateway: str) -> tuple[int, int, int, int, int]:
    """Order ties: the least loaded, then the warmest, then in rotation, then by gateway.

    The last makes a burst that hits several idle gateways at once spread over the targets.
    """
    return (
        candidate.num_active,
        candidate.queued_prefill_tokens,
        -candidate.num_reusable_tokens,
        candidate.last_placed,
        _rank_at(gateway, candidate.target),
    )


@lru_cache(maxsize=1024)
def _rank_at(gateway: str, target: Target) -> int:
    """Return the place of a target in an order of this gateway's own; remembered for its cost."""
    return zlib.crc32(f"{gateway} {target}".encode())


def replayed(place: Place, request: PlanRequest, policy: Policy, *, gateway: str) -> Target:
    """Decide a recorded placement anew; `policy` may be another one than decided it."""
    took_part = [c for c in place.candidates if c.score is not None or c.excluded is None]
    if place.rule == "copy":
        took_part = without_holders(took_part)
    return choose(
        scored(policy, request, took_part), policy, rule=place.rule, gateway=gateway
    ).target


def without(candidates: Sequence[Candidate], rated: Sequence[Candidate]) -> list[Candidate]:
    """Leave out those whose targets were rated."""
    if len(candidates) == len(rated):
        return []
    considered = {candidate.target for candidate in rated}
    return [candidate for candidate in candidates if candidate.target not in considered]


def without_holders(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out those that hold, or are about to hold, what is cached of the prompt anywhere."""
    most = max(candidate.num_cached_tokens for candidate in candidates)
    return [c for c in candidates if c.num_reusable_tokens < most]
