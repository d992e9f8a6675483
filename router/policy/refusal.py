"""The answer when no target is left for a request: why, and when another try may find one.

Pure; which targets are left is decided by the planner's guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from router.policy.types import Candidate, Exclusion, NoReplica, Shed

_REASONS: Mapping[Exclusion, str] = {
    "tried": "has failed it",
    "not_isolating": "serves only tenants with `isolation: shared`, as it honours no cache salt",
    "other_execution": "computes otherwise than the one that began its answer",
    "too_short": "has too short a context for it",
    "draining": "is draining",
    "breaker_open": "has failed too often lately",
    "saturated": "is too far behind",
    "lapsed": "has let its lease lapse",
}


def refusal(
    candidates: Sequence[Candidate],
    *,
    max_queue_s: float,
    reopens_in_s: Callable[[str], float],
) -> Shed | NoReplica:
    """Say why each of these targets is excluded.

    `max_queue_s` is what a target may have before it to be none of the saturated ones;
    `reopens_in_s` tells of a replica when its breaker lets a request through again.
    """
    saturated = [c.queue_s for c in candidates if c.excluded == "saturated"]
    if saturated:
        wait_s = min(saturated) - max_queue_s
        return Shed(retry_after_s=max(1.0, wait_s), candidates=tuple(candidates))
    broken = [c.target.replica for c in candidates if c.excluded == "breaker_open"]
    waits = [reopens_in_s(replica) for replica in broken]
    reasons = sorted({_REASONS[c.excluded] for c in candidates if c.excluded is not None})
    return NoReplica(
        reason=f"every replica {' or '.join(reasons)}" if reasons else "there is none",
        retry_after_s=max(1.0, min(waits)) if waits else None,
        candidates=tuple(candidates),
    )
