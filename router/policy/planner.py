"""The planner: where a request goes. Synchronous, pure, and the only place of every guard.

State in, decision out: the gateway and the simulator drive the same object. It knows no HTTP, no
Redis and no clock; it is told what happened through `first_token` and `finish`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from router.policy.breaker import Breaker
from router.policy.ledger import Entry, Ledger
from router.policy.types import (
    BreakerState,
    Candidate,
    Decision,
    Exclusion,
    NoReplica,
    Place,
    PlanRequest,
    Policy,
    Shed,
    TargetView,
)

Outcome = Literal["answered", "failed", "abandoned"]
"""How an attempt ended for its replica: it spoke (4xx too), it failed, or nobody can tell."""


_REASONS: Mapping[Exclusion, str] = {
    "tried": "has failed it",
    "not_isolating": "serves only tenants with `isolation: shared`, as it honours no cache salt",
    "too_short": "has too short a context for it",
    "draining": "is draining",
    "breaker_open": "has failed too often lately",
    "saturated": "is too far behind",
    "lapsed": "has let its lease lapse",
}


class PlannerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the guards, and the rates (tokens/s) assumed where no target reports any."""

    max_queue_s: float = 120.0
    prefill_tokens_per_s: float = 1000.0
    decode_tokens_per_s: float = 100.0


class _Rates(NamedTuple):
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Planner:
    """Places requests by the policy of their tenant.

    Order of the guards: tried, not isolating, too short, draining, breaker, saturated, lapsed.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        config: PlannerConfig | None = None,
        gateway: str = "",
    ) -> None:
        """Start with nothing running; `gateway` makes the last tie-break differ between gateways.

        Otherwise a burst that hits idle gateways at once would go to one target.
        """
        self._policies = policies
        self._config = config or PlannerConfig()
        self._gateway = gateway
        self._breakers: dict[str, Breaker] = {}
        self.ledger = Ledger()

    def plan(self, request: PlanRequest, views: Sequence[TargetView], now: float) -> Decision:
        """Decide, and on `Place` count the request as running there until `finish`; O(views)."""
        policy = self._policies[request.tenant]
        rates = self._usual_rates(views)
        candidates = [self._candidate(request, view, rates, now) for view in views]
        open_ones = [c for c in candidates if c.excluded is None]
        if not open_ones:
            open_ones = [c for c in candidates if c.excluded == "lapsed"]
        if not open_ones:
            return self._refuse(candidates, now)
        scored = [msgspec.structs.replace(c, score=policy.score(c)) for c in open_ones]
        winner = self._choose(scored, policy)
        entry = Entry(
            winner.target,
            prefill_tokens=winner.num_uncached_tokens,
            hashes=request.hashes,
            probe=self._breaker(winner.target.replica).sent(now),
        )
        self.ledger.open((request.request_id, request.attempt), entry)
        considered = {c.target for c in scored}
        others = [c for c in candidates if c.target not in considered]
        return Place(winner=winner, policy=policy.name, candidates=(*scored, *others))

    def first_token(self, request_id: str, attempt: int) -> None:
        """Note that the prefill is over and the replica alive."""
        entry = self.ledger.end_prefill((request_id, attempt))
        if entry is not None:
            self._breaker(entry.target.replica).succeeded()

    def finish(self, request_id: str, attempt: int, outcome: Outcome, now: float) -> None:
        """Stop counting an attempt; finishing it twice is harmless."""
        entry = self.ledger.close((request_id, attempt))
        if entry is None:
            return
        breaker = self._breaker(entry.target.replica)
        if outcome == "answered":
            breaker.succeeded()
        elif outcome == "failed":
            breaker.failed(now, probe=entry.probe)
        else:
            breaker.abandoned(probe=entry.probe)

    def breaker_state(self, replica: str, now: float) -> BreakerState:
        """Return the state of a replica's breaker."""
        return self._breaker(replica).state(now)

    def forget(self, replicas: Sequence[str]) -> None:
        """Drop what is remembered of replicas that have left the fleet; running work stays."""
        gone = set(replicas)
        for replica in gone:
            self._breakers.pop(replica, None)
        accounts = self.ledger.accounts
        for target in [t for t in accounts if t.replica in gone and not accounts[t].num_active]:
            del accounts[target]

    def _breaker(self, replica: str) -> Breaker:
        return self._breakers.setdefault(replica, Breaker())

    def _choose(self, scored: Sequence[Candidate], policy: Policy) -> Candidate:
        """Take the best score; among ties the least loaded, then the warmest, then in rotation."""
        scores = [candidate.score or 0.0 for candidate in scored]
        best = min(scores)
        limit = best + policy.tolerance(best)
        ties = [c for c, score in zip(scored, scores, strict=True) if score <= limit]
        return min(ties, key=self._tie_order)

    def _tie_order(self, candidate: Candidate) -> tuple[int, int, int, int, int]:
        return (
            candidate.num_active,
            candidate.queued_prefill_tokens,
            -candidate.num_reusable_tokens,
            candidate.last_placed,
            zlib.crc32(f"{self._gateway} {candidate.target}".encode()),
        )

    def _usual_rates(self, views: Sequence[TargetView]) -> _Rates:
        """Return the rates assumed of a target that was never measured: those of its peers.

        Anything else would make the unmeasured ones look better, or worse, than they are.
        """
        prefill = [v.prefill_tokens_per_s for v in views if v.prefill_tokens_per_s]
        decode = [v.decode_tokens_per_s for v in views if v.decode_tokens_per_s]
        return _Rates(
            fmean(prefill) if prefill else self._config.prefill_tokens_per_s,
            fmean(decode) if decode else self._config.decode_tokens_per_s,
        )

    def _candidate(
        self, request: PlanRequest, view: TargetView, rates: _Rates, now: float
    ) -> Candidate:
        account = self.ledger.account(view.target)
        prefill_rate = view.prefill_tokens_per_s or rates.prefill_tokens_per_s
        cached = predicted_tokens(request, view.matched_blocks)
        num_running_blocks = account.num_running_blocks(request.hashes)
        reusable_blocks = max(view.matched_blocks + view.pending_blocks, num_running_blocks)
        reusable = predicted_tokens(request, reusable_blocks)
        uncached = request.num_prompt_tokens - reusable
        queued = account.prefill_tokens + view.reserved_prefill_tokens
        queue_s = queued / prefill_rate
        return Candidate(
            target=view.target,
            mode=view.mode,
            num_cached_tokens=cached,
            num_reusable_tokens=reusable,
            num_uncached_tokens=uncached,
            num_active=account.num_active + view.num_reserved,
            queued_prefill_tokens=queued,
            last_placed=account.last_placed,
            prefill_tokens_per_s=prefill_rate,
            decode_tokens_per_s=view.decode_tokens_per_s or rates.decode_tokens_per_s,
            queue_s=queue_s,
            expected_s=queue_s + uncached / prefill_rate,
            excluded=self._exclusion(request, view, queue_s=queue_s, now=now),
        )

    def _exclusion(
        self, request: PlanRequest, view: TargetView, *, queue_s: float, now: float
    ) -> Exclusion | None:
        if view.target.replica in request.tried:
            return "tried"
        if request.isolated and not view.isolates:
            return "not_isolating"
        if view.max_model_len is not None and request.num_total_tokens > view.max_model_len:
            return "too_short"
        if view.draining:
            return "draining"
        if not self._breaker(view.target.replica).allows(now):
            return "breaker_open"
        if queue_s > self._config.max_queue_s:
            return "saturated"
        return None if view.live else "lapsed"

    def _refuse(self, candidates: Sequence[Candidate], now: float) -> Shed | NoReplica:
        saturated = [c.queue_s for c in candidates if c.excluded == "saturated"]
        if saturated:
            wait_s = min(saturated) - self._config.max_queue_s
            return Shed(retry_after_s=max(1.0, wait_s), candidates=tuple(candidates))
        broken = [c.target.replica for c in candidates if c.excluded == "breaker_open"]
        waits = [self._breaker(replica).wait_s(now) for replica in broken]
        reasons = sorted({_REASONS[c.excluded] for c in candidates if c.excluded is not None})
        return NoReplica(
            reason=f"every replica {' or '.join(reasons)}" if reasons else "there is none",
            retry_after_s=max(1.0, min(waits)) if waits else None,
            candidates=tuple(candidates),
        )


def predicted_tokens(request: PlanRequest, num_blocks: int) -> int:
    """Return how many prompt tokens `num_blocks` save: the last one is always computed."""
    if request.block_size is None:
        return 0
    usable = (request.num_prompt_tokens - 1) // request.block_size
    return max(0, min(num_blocks, usable)) * request.block_size
