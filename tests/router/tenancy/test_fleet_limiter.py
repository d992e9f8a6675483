"""A gateway's share of the limits while its store is away; the test pulls the plug."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import DependencyError
from router.config import Limits
from router.tenancy.fleet_limiter import FleetLimiter
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import (
    Claim,
    Exchanged,
    Heartbeat,
    Notice,
    Scope,
    ScopeUse,
    Settlement,
    Spent,
    Verdict,
)
from router.tenancy.local_limiter import LocalLimiter

NOON = 1_796_126_400.0
LEASE_S = 10.0


class Store:
    """A real limiter that can be unplugged."""

    def __init__(self, ledger: LimitLedger, gateway: str, clock: VirtualClock) -> None:
        self._limiter = LocalLimiter(ledger, gateway=gateway, clock=clock)
        self.is_away = False

    async def reserve(self, claim: Claim) -> Verdict:
        self._check()
        return await self._limiter.reserve(claim)

    async def settle(self, *settlements: Settlement) -> None:
        self._check()
        await self._limiter.settle(*settlements)

    async def uses(self, scopes: Sequence[str]) -> list[ScopeUse]:
        self._check()
        return await self._limiter.uses(scopes)

    async def heartbeat(self, *, lease_s: float) -> Heartbeat:
        self._check()
        return await self._limiter.heartbeat(lease_s=lease_s)

    async def exchange(self, notice: Notice) -> Exchanged:
        self._check()
        return await self._limiter.exchange(notice)

    async def recall(self, accounts: Sequence[Spent]) -> None:
        self._check()
        await self._limiter.recall(accounts)

    async def close(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.is_away:
            raise DependencyError("Redis at redis://127.0.0.1:1/0: connection refused")


class Fleet:
    """Gateways over one ledger."""

    def __init__(self, number: int) -> None:
        self.clock, self.ledger = VirtualClock(NOON), LimitLedger()
        names = [f"gw-{i}" for i in range(number)]
        self.stores = [Store(self.ledger, name, self.clock) for name in names]
        self.gateways = [
            FleetLimiter(store, gateway=name, clock=self.clock)
            for name, store in zip(names, self.stores, strict=True)
        ]
        self._num_claims = 0

    async def beat(self) -> None:
        for gateway in self.gateways:
            await gateway.heartbeat(lease_s=LEASE_S)

    def unplug(self) -> None:
        for store in self.stores:
            store.is_away = True

    def plug_in(self) -> None:
        for store in self.stores:
            store.is_away = False

    async def admit(self, gateway: int, scope: Scope, *, tokens: int = 1, number: int) -> int:
        """Return how many of `number` claims a gateway admits."""
        admitted = 0
        for _ in range(number):
            self._num_claims += 1
            claim = Claim(id=f"{self._num_claims}", scopes=(scope,), num_tokens=tokens)
            admitted += (await self.gateways[gateway].reserve(claim)).hit is None
        return admitted


async def fleet_of(number: int) -> Fleet:
    """Return gateways that have counted each other."""
    fleet = Fleet(number)
    await fleet.beat()
    await fleet.beat()
    return fleet


@pytest.mark.fault("router-52")
async def test_four_gateways_together_stay_within_the_limit_with_and_without_the_store() -> None:
    fleet = await fleet_of(4)
    scope = Scope("tenant/acme", Limits(tokens_per_minute=1000))
    together = [await fleet.admit(i, scope, tokens=30, number=20) for i in range(4)]
    assert (together, sum(together) * 30) == ([20, 13, 0, 0], 990)
    fleet.unplug()
    # What a gateway has admitted itself counts against its share of 250.
    alone = [await fleet.admit(i, scope, tokens=30, number=20) for i in range(4)]
    assert alone == [0, 0, 8, 8]


async def test_a_share_is_at_least_one() -> None:
    fleet = await fleet_of(3)
    fleet.unplug()
    scope = Scope("tenant/acme", Limits(max_parallel=2))
    assert [await fleet.admit(i, scope, number=3) for i in range(3)] == [1, 1, 1]


async def test_a_budget_that_was_spent_elsewhere_stays_spent() -> None:
    fleet = await fleet_of(2)
    scope = Scope("tenant/acme", Limits(tokens_per_day=100))
    assert await fleet.admit(0, scope, tokens=10, number=7) == 7
    assert await fleet.admit(1, scope, tokens=10, number=1) == 1
    fleet.unplug()
    # Gateway 1 has seen 80 spent and may use half of the rest; gateway 0 last saw 70.
    assert [await fleet.admit(i, scope, tokens=5, number=9) for i in range(2)] == [3, 2]


async def test_a_new_day_gives_each_gateway_its_share_of_the_new_budget() -> None:
    fleet = await fleet_of(2)
    scope = Scope("tenant/acme", Limits(tokens_per_day=100))
    assert await fleet.admit(0, scope, tokens=10, number=10) == 10
    fleet.unplug()
    assert await fleet.admit(0, scope, tokens=10, number=1) == 0
    fleet.clock.advance(86_400)
    assert [await fleet.admit(i, scope, tokens=10, number=9) for i in range(2)] == [5, 5]


async def test_settlements_reach_the_store_once_it_is_back() -> None:
    fleet = await fleet_of(2)
    fleet.unplug()
    scope = Scope("tenant/acme", Limits(max_parallel=2))
    claim = Claim(id="c", scopes=(scope,), num_tokens=9)
    assert (await fleet.gateways[0].reserve(claim)).hit is None
    settlement = Settlement(id="c", scopes=("tenant/acme",), num_tokens=7)
    await fleet.gateways[0].settle(settlement)
    assert fleet.gateways[0].num_undelivered == 1
    assert await fleet.admit(0, scope, number=1) == 1
    fleet.plug_in()
    await fleet.beat()
    assert (fleet.gateways[0].num_undelivered, fleet.gateways[0].down_reason) == (0, None)
    (use,) = await fleet.gateways[1].uses(["tenant/acme"])
    assert use.day_tokens == 7


async def test_after_an_outage_gateways_are_not_forgotten_before_they_can_be_back() -> None:
    fleet = await fleet_of(3)
    fleet.unplug()
    fleet.clock.advance(60)
    fleet.plug_in()
    first = fleet.gateways[0]
    counted = []
    for _ in range(3):
        await first.heartbeat(lease_s=LEASE_S)
        counted.append(first.num_gateways)
        fleet.clock.advance(LEASE_S / 2)
    assert counted == [3, 3, 1]
