"""A planner with a queue over targets that prefill one request after the other, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from router.policy.planner import Planner, PlannerConfig
from router.policy.queueing import QueueConfig
from router.policy.registry import build_policy
from router.policy.types import Decision, Place, PlanRequest, Wait
from tests.router.policy.build import RATE, ask, view


@dataclass(slots=True)
class Served:
    """When a request came, was placed, and gave its first token."""

    arrived_at: float
    placed_at: float | None = None
    first_token_at: float | None = None
    decision: Decision | None = None


@dataclass(slots=True)
class VirtualFleet:
    """Targets named by `names`; each computes 1000 tokens a second, in order of placement."""

    planner: Planner
    names: tuple[str, ...]
    now: float = 0.0
    served: dict[str, Served] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    matched: dict[str, dict[str, int]] = field(default_factory=dict)
    _free_at: dict[str, float] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _requests: dict[str, PlanRequest] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)

    def at(self, instant: float, do: Callable[[], None]) -> None:
        """Do something at an instant."""
        heapq.heappush(self._events, (instant, next(self._numbers), do))

    def arrive(self, request_id: str, tenant: str, num_tokens: int, **fields: Any) -> None:
        """Let a request come in now; its output is over with its first token."""
        request = ask(request_id, num_tokens, tenant=tenant, **fields)
        self._requests[request_id] = request
        self.served[request_id] = Served(self.now)
        self._plan(request)
        self._turns()

    def run(self, *, until: float = float("inf")) -> None:
        """Let time pass until nothing happens any more, or up to an instant."""
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def _views(self, request_id: str) -> list[Any]:
        matched = self.matched.get(request_id, {})
        return [view(name, matched_blocks=matched.get(name, 0)) for name in self.names]

    def _plan(self, request: PlanRequest) -> None:
        decision = self.planner.plan(request, self._views(request.request_id), self.now)
        served = self.served[request.request_id]
        served.decision = decision
        if isinstance(decision, Wait):
            self.at(decision.until, self._turns)
        if isinstance(decision, Place):
            served.placed_at = self.now
            self.order.append(request.request_id)
            self._compute(request, decision)

    def _compute(self, request: PlanRequest, place: Place) -> None:
        name = place.winner.target.replica
        start = max(self.now, self._free_at.get(name, 0.0))
        end = self._free_at[name] = start + place.winner.num_uncached_tokens / RATE
        self.at(end, lambda: self._first_token(request.request_id))

    def _first_token(self, request_id: str) -> None:
        self.served[request_id].first_token_at = self.now
        self.planner.first_token(request_id, 1)
        self.planner.finish(request_id, 1, "answered", self.now)
        self._turns()

    def _turns(self) -> None:
        while (request_id := self.planner.next_turn("m", self.now)) is not None:
            self._plan(self._requests[request_id])


def virtual_fleet(
    *names: str, policy: str = "prefix_cost", tenants: str = "ab", **queue: Any
) -> VirtualFleet:
    """Return a fleet whose tenants, one letter each, have the same policy."""
    policies = {tenant: build_policy(policy, {}, owner="test") for tenant in tenants}
    config = PlannerConfig(queue=QueueConfig(**({"quantum_tokens": 1000} | queue)))
    return VirtualFleet(Planner(policies, config=config, gateway="gw"), names)
