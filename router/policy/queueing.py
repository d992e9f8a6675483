"""The waiting requests of one model: who has the turn, and whether trying makes sense now.

It puts limits around the fair order; where a request goes, and when a target accepts, is the
planner's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from engine.frontend.charge import charge
from router.policy.fair_share import FairShare, Ticket
from router.policy.types import Candidate, PlanRequest, Shed, Wait

_LEAST_WAIT_S = 0.01
_LOOK_S = 0.1
"""Half of what another gateway yields: whoever waits for that looks this often."""
_PATIENCE = 2.0
"""A request stays with its prefix for so many times as its target was busy at first."""
_OF_THE_REQUEST = frozenset({"tried", "too_short", "not_isolating", "other_execution"})


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests wait, and for how long.

    A target accepts while the prefill reserved there would take less than `accept_s`. A tenant may
    have `max_waiting` requests waiting, each for `max_wait_s`. `quantum_tokens` is a tenant's part
    of a round, `floor_share` what a waiting lower priority gets of all that is served above it.
    """

    accept_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    max_waiting: Annotated[int, msgspec.Meta(ge=1)] = 1024
    max_wait_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    quantum_tokens: Annotated[int, msgspec.Meta(ge=1)] = 4096
    floor_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1


@dataclass(slots=True)
class ModelQueue:
    """`turn` is the request that is to be planned now; `blocked_until` no target accepts."""

    config: QueueConfig
    turn: str | None = None
    blocked_until: float = 0.0
    share: FairShare = field(init=False)

    def __post_init__(self) -> None:
        self.share = FairShare(self.config.quantum_tokens, self.config.floor_share)

    def must_wait(self, request_id: str, tenant: str, now: float) -> bool:
        """Say whether others come first."""
        if self.turn == request_id:
            return False
        if self.turn is not None:
            return True
        if self._is_blocked(now) or self.share.must_yield(tenant, now):
            return True
        return self.share.next(now) is not None

    def next_turn(self, now: float) -> str | None:
        """Give the turn to the next request; None when it is taken or nobody can go now."""
        if self.turn is not None or self._is_blocked(now):
            return None
        ticket = self.share.next(now)
        self.turn = ticket.request_id if ticket is not None else None
        return self.turn

    def next_instant(self) -> float | None:
        """Return when to look again although nothing has happened, None when nobody waits."""
        return self.share.next_instant(self.blocked_until)

    def is_full(self, tenant: str) -> bool:
        """Say whether a tenant may not let one more request wait."""
        return self.share.num_waiting(tenant) >= self.config.max_waiting

    def stopped(self, request: PlanRequest, now: float) -> Wait | Shed | None:
        """Say what keeps a request from being planned: others before it, or its own deadline."""
        ticket = self.share.get(request.request_id)
        if ticket is not None and ticket.deadline <= now:
            self.leave(request.request_id)
            return self._shed((), now)
        if not self.must_wait(request.request_id, request.tenant, now):
            return None
        if ticket is None and self.is_full(request.tenant):
            return self._shed((), now)
        return Wait(until=self._ticket(request, now).deadline, reason="turn")

    def wait(
        self,
        request: PlanRequest,
        reason: Literal["full", "affinity"],
        until: float,
        candidates: Sequence[Candidate],
        now: float,
    ) -> Wait | Shed:
        """Let a request wait for a target.

        When it is full for this request, it is so for all, unless the request itself is choosy.
        """
        if self.share.get(request.request_id) is None and self.is_full(request.tenant):
            return self._shed(candidates, now)
        ticket = self._ticket(request, now)
        until = min(max(until, now + _LEAST_WAIT_S), ticket.deadline)
        if reason == "affinity" and ticket.stays_until is None:
            ticket.stays_until = now + _PATIENCE * (until - now + self.config.accept_s)
        if reason == "full" and not any(c.excluded in _OF_THE_REQUEST for c in candidates):
            self.share.found_full()
            if self.share.has_rivals:
                until = min(until, now + _LOOK_S)  # What they yield is not there for long.
            self.blocked_until = until
        else:
            ticket.not_before = until
        return Wait(until=until, reason=reason, candidates=tuple(candidates))

    def may_stay(self, request_id: str, now: float) -> bool:
        """Say whether a request may wait on for the target that has its prefix.

        One that does not get on as expected, because it hangs, keeps nobody from the others.
        """
        ticket = self.share.get(request_id)
        return ticket is None or ticket.stays_until is None or now < ticket.stays_until

    def has(self, request_id: str) -> bool:
        """Say whether a request waits."""
        return self.share.get(request_id) is not None

    def placed(self, request: PlanRequest, winner: Candidate) -> None:
        """Charge the tenant for what is computed of its prompt, if anybody has to wait."""
        self.share.placed(request.tenant)
        cost = charge(
            num_uncached_tokens=winner.num_uncached_tokens,
            num_cached_tokens=winner.num_reusable_tokens,
            num_output_tokens=0,
        )
        if self.has(request.request_id):
            self.share.served(request.request_id, cost)
        elif self.share.has_rivals:
            self.share.served_at_once(request.tenant, request.weight, cost)

    def charge_output(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for what was generated."""
        cost = charge(num_uncached_tokens=0, num_cached_tokens=0, num_output_tokens=num_tokens)
        self.share.charge(tenant, cost)

    def end_turn(self, request_id: str) -> None:
        """Take the turn back from whoever has been planned."""
        if self.turn == request_id:
            self.turn = None

    def leave(self, request_id: str) -> None:
        """Forget a request that waits no longer."""
        self.end_turn(request_id)
        self.share.remove(request_id)

    def _ticket(self, request: PlanRequest, now: float) -> Ticket:
        """Return the ticket of a request, a new one when it comes to wait."""
        ticket = self.share.get(request.request_id)
        if ticket is None:
            ticket = Ticket(
                request_id=request.request_id,
                tenant=request.tenant,
                weight=request.weight,
                priority=request.priority,
                num_tokens=request.num_prompt_tokens,
                deadline=now + self.config.max_wait_s,
            )
            self.share.enqueue(ticket)
        return ticket

    def _shed(self, candidates: Sequence[Candidate], now: float) -> Shed:
        """Refuse; a place may be free when a target accepts again, or in a second."""
        retry_after_s = max(1.0, self.blocked_until - now)
        return Shed(retry_after_s=retry_after_s, candidates=tuple(candidates))

    def _is_blocked(self, now: float) -> bool:
        return len(self.share) > 0 and now < self.blocked_until
