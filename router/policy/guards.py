"""What keeps a request from a target, whatever its policy would say, and each replica's breaker.

It knows neither scores nor queues; what the exclusions lead to is decided in planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.policy.breaker import Breaker
from router.policy.types import BreakerState, Exclusion, PlanRequest, TargetView


@dataclass(slots=True)
class Guards:
    """Judges targets; of those with more than `max_queue_s` of prefill before them none is taken.

    Only replicas that have failed a request have a breaker; all others are as one that is closed.
    """

    max_queue_s: float
    _breakers: dict[str, Breaker] = field(default_factory=dict)

    def exclusion(
        self, request: PlanRequest, view: TargetView, *, queue_s: float, now: float
    ) -> Exclusion | None:
        """Return the first guard that applies, None when a target may serve a request."""
        replica = view.target.replica
        if replica in request.tried:
            return "tried"
        if request.isolated and not view.isolates:
            return "not_isolating"
        if request.execution is not None and request.execution != view.execution:
            return "other_execution"
        if view.max_model_len is not None and request.num_total_tokens > view.max_model_len:
            return "too_short"
        if view.draining:
            return "draining"
        if replica in self._breakers and not self._breakers[replica].allows(now):
            return "breaker_open"
        if queue_s > self.max_queue_s:
            return "saturated"
        return None if view.live else "lapsed"

    def breaker_state(self, replica: str, now: float) -> BreakerState:
        """Return the state of a replica's breaker."""
        breaker = self._breakers.get(replica)
        return "closed" if breaker is None else breaker.state(now)

    def reopens_in_s(self, replica: str, now: float) -> float:
        """Return when a replica's breaker lets a request through again, 0 when it does now."""
        breaker = self._breakers.get(replica)
        return 0.0 if breaker is None else breaker.wait_s(now)

    def sent(self, replica: str, now: float) -> bool:
        """Note that a request goes to a replica; True when it is the probe of its breaker."""
        breaker = self._breakers.get(replica)
        return breaker is not None and breaker.sent(now)

    def succeeded(self, replica: str) -> None:
        """Note that a replica answered."""
        breaker = self._breakers.get(replica)
        if breaker is not None:
            breaker.succeeded()

    def failed(self, replica: str, now: float, *, probe: bool) -> None:
        """Note that a replica did not answer, or answered with 5xx."""
        self._breakers.setdefault(replica, Breaker()).failed(now, probe=probe)

    def abandoned(self, replica: str, *, probe: bool) -> None:
        """Note that a request ended without telling anything about the replica."""
        breaker = self._breakers.get(replica)
        if breaker is not None:
            breaker.abandoned(probe=probe)

    def forget(self, replicas: Iterable[str]) -> None:
        """Drop the breakers of replicas that have left the fleet."""
        for replica in replicas:
            self._breakers.pop(replica, None)
