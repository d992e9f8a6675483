"""Two gateways before the same target: a flood at one does not starve a tenant at the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest

from router.policy.fair_share import YIELD_S
from router.policy.planner import Planner, PlannerConfig
from router.policy.queueing import QueueConfig
from router.policy.registry import build_policy
from router.policy.retry_budget import RetryBudget
from router.policy.types import Place, PlanRequest
from router.tenancy.exchange import Exchange
from router.tenancy.limit_ledger import LimitLedger
from tests.router.policy.build import RATE, ask, view

ACCEPT_S = 2.0
BEAT_S = 1.0
LOOK_S = 0.1
QUANTUM = 1000
COST_S = 0.5
"""How long the target computes each request of the flood."""
LEASE_S = 10.0


@dataclass(slots=True)
class VirtualGateway:
    """A gateway's planner, its requests that wait, and its side of the exchange."""

    name: str
    planner: Planner
    exchange: Exchange
    waiting: dict[str, PlanRequest] = field(default_factory=dict)
    reserved: int = 0


@dataclass(slots=True)
class VirtualFleet:
    """Gateways over one target that computes 1000 tokens a second, in virtual time."""

    gateways: list[VirtualGateway]
    talks: bool
    now: float = 0.0
    order: list[str] = field(default_factory=list)
    placed_at: dict[str, float] = field(default_factory=dict)
    busy_until: float = 0.0
    idle_s: float = 0.0
    _ledger: LimitLedger = field(default_factory=LimitLedger)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)

    def start(self) -> None:
        for i, gateway in enumerate(self.gateways):
            self._every(BEAT_S, partial(self._beat, gateway), first=0.3 * i)
            self._every(LOOK_S, partial(self._offer, gateway), first=0.03 * i)

    def arrive(self, number: int, request_id: str, tenant: str, seconds: float) -> None:
        """Let a request of so many seconds of prefill come to a gateway now."""
        gateway = self.gateways[number]
        gateway.waiting[request_id] = ask(request_id, int(seconds * RATE), tenant=tenant)
        self._plan(gateway, request_id)
        self._offer(gateway)

    def run(self, *, until: float) -> None:
        while self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = until

    def _at(self, instant: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (instant, next(self._numbers), do))

    def _every(self, seconds: float, do: Callable[[], None], *, first: float) -> None:
        def again() -> None:
            do()
            self._at(self.now + seconds, again)

        self._at(first, again)

    def _beat(self, gateway: VirtualGateway) -> None:
        self._ledger.renew(gateway.name, now=self.now, lease_s=LEASE_S)
        if self.talks:
            notice = gateway.exchange.notice()
            answer = self._ledger.exchange(notice, gateway=gateway.name, now=self.now)
            gateway.exchange.take(notice, answer)

    def _offer(self, gateway: VirtualGateway) -> None:
        while (request_id := gateway.planner.next_turn("m", self.now)) is not None:
            self._plan(gateway, request_id)

    def _plan(self, gateway: VirtualGateway, request_id: str) -> None:
        request = gateway.waiting[request_id]
        others = sum(other.reserved for other in self.gateways if other is not gateway)
        seen = [view("x", reserved_prefill_tokens=others)]
        decision = gateway.planner.plan(request, seen, self.now)
        if not isinstance(decision, Place):
            return
        del gateway.waiting[request_id]
        self.order.append(request_id)
        self.placed_at[request_id] = self.now
        tokens = decision.winner.num_uncached_tokens
        gateway.reserved += tokens
        self.idle_s += max(0.0, self.now - self.busy_until)
        self.busy_until = max(self.now, self.busy_until) + tokens / RATE
        self._at(self.busy_until, lambda: self._first_token(gateway, request_id, tokens))

    def _first_token(self, gateway: VirtualGateway, request_id: str, tokens: int) -> None:
        gateway.reserved -= tokens
        gateway.planner.first_token(request_id, 1)
        gateway.planner.finish(request_id, 1, "answered", self.now)
        self._offer(gateway)


def fleet(*, talks: bool = True) -> VirtualFleet:
    config = PlannerConfig(queue=QueueConfig(quantum_tokens=QUANTUM, accept_s=ACCEPT_S))
    gateways = []
    for name in ("one", "two"):
        policies = {tenant: build_policy("prefix_cost", {}, owner="test") for tenant in "ab"}
        planner = Planner(policies, config=config, gateway=name)
        exchange = Exchange(planner, RetryBudget(share=0.2, burst=10))
        gateways.append(VirtualGateway(name, planner, exchange))
    started = VirtualFleet(gateways, talks)
    started.start()
    return started


def flooded(*, talks: bool = True) -> VirtualFleet:
    """Return a fleet in which tenant a has 200 requests at gateway one."""
    virtual = fleet(talks=talks)
    for i in range(200):
        virtual.arrive(0, f"a{i}", "a", COST_S)
    return virtual


@pytest.mark.fault("router-56")
def test_a_short_request_at_another_gateway_waits_no_longer_than_the_stated_bound() -> None:
    virtual = flooded()
    for at in (3.4, 7.1, 11.8, 20.0, 33.3):
        virtual.run(until=at)
        virtual.arrive(1, f"b{at}", "b", 0.1)
    virtual.run(until=60.0)
    waits = [virtual.placed_at[f"b{at}"] - at for at in (3.4, 7.1, 11.8, 20.0, 33.3)]
    # Both gateways' next words, a quantum and one request of the flood, and what is yielded.
    assert max(waits) <= 2 * BEAT_S + QUANTUM / RATE + COST_S + YIELD_S


def test_without_a_word_between_the_gateways_it_would_wait_for_the_flood_to_end() -> None:
    virtual = flooded(talks=False)
    virtual.run(until=3.4)
    virtual.arrive(1, "b0", "b", 0.1)
    virtual.run(until=33.4)
    assert "b0" not in virtual.placed_at


def test_backlogs_at_two_gateways_are_served_alike_and_the_target_is_never_idle() -> None:
    virtual = flooded()
    for i in range(200):
        virtual.arrive(1, f"b{i}", "b", COST_S)
    virtual.run(until=60.0)
    served = {tenant: sum(name[0] == tenant for name in virtual.order) for tenant in "ab"}
    assert abs(served["a"] - served["b"]) <= 8, served
    assert virtual.idle_s == 0.0


def test_a_tenant_that_floods_both_gateways_gets_no_more_than_its_half() -> None:
    virtual = flooded()
    for i in range(200):
        virtual.arrive(1, f"aa{i}", "a", COST_S)
        virtual.arrive(1, f"b{i}", "b", COST_S)
    virtual.run(until=60.0)
    served = {tenant: sum(name[0] == tenant for name in virtual.order) for tenant in "ab"}
    assert abs(served["a"] - served["b"]) <= 12, served
    assert virtual.idle_s == 0.0
