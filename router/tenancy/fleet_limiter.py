"""Limits that outlive their store: shared while Redis answers, a share of each while it does not.

What this gateway admits is always counted in memory too, so that its share is right from the first
request on its own. Settlements that Redis could not take are kept and delivered later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import DependencyError
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import (
    Claim,
    Exchanged,
    Heartbeat,
    Limiter,
    Notice,
    Scope,
    ScopeUse,
    Settlement,
    Spent,
    Verdict,
)
from router.tenancy.periods import Periods, periods_at

log = logging.getLogger("prefixfleet.router.tenancy")

_MAX_UNDELIVERED = 50_000
_TOGETHER = 100
"""Settlements that are delivered at once after an outage: the store is busy for a few ms."""


class _Seen(NamedTuple):
    """What the fleet, and this gateway, had spent when the store last told."""

    periods: Periods
    day_tokens: int
    month_tokens: int
    own_day_tokens: int
    own_month_tokens: int


class FleetLimiter:
    """`Limiter` that never raises DependencyError: without its store it goes on alone.

    `num_gateways` is how many shared the store lately; `down_reason` None while it answers.
    """

    def __init__(self, shared: Limiter, *, gateway: str, clock: Clock) -> None:
        self._shared = shared
        self._gateway = gateway
        self._clock = clock
        self._own = LimitLedger()
        self._seen: dict[str, _Seen] = {}
        self.num_gateways = 1
        self._counts: list[tuple[float, int]] = []
        self._undelivered: deque[Settlement] = deque(maxlen=_MAX_UNDELIVERED)
        self.down_reason: str | None = None

    @property
    def num_undelivered(self) -> int:
        """Settlements that wait for the store to return."""
        return len(self._undelivered)

    async def reserve(self, claim: Claim) -> Verdict:
        """Count a claim in the fleet's accounts, or against this gateway's share."""
        if self.down_reason is None:
            try:
                verdict = await self._shared.reserve(claim)
            except DependencyError as error:
                self._lost(error)
            else:
                self._note(claim, verdict)
                return verdict
        now = self._clock.now()
        scopes = tuple(self._share(scope, periods_at(now)) for scope in claim.scopes)
        alone = msgspec.structs.replace(claim, scopes=scopes)
        return self._own.reserve(alone, gateway=self._gateway, now=now)

    async def settle(self, *settlements: Settlement) -> None:
        """Settle here and in the store, there as soon as it can take it."""
        now = self._clock.now()
        for settlement in settlements:
            self._own.settle(settlement, now=now)
        if self.down_reason is None:
            try:
                await self._shared.settle(*settlements)
                return
            except DependencyError as error:
                self._lost(error)
            except asyncio.CancelledError:
                self._keep(settlements)
                raise
        self._keep(settlements)

    def _keep(self, settlements: Sequence[Settlement]) -> None:
        """Keep settlements until the store can take them."""
        for settlement in settlements:
            if len(self._undelivered) == _MAX_UNDELIVERED:
                log.error("usage lost request_id=%s: too much to keep", self._undelivered[0].id)
            self._undelivered.append(settlement)

    async def uses(self, scopes: Sequence[str]) -> list[ScopeUse]:
        """Tell what scopes have used: in the fleet, or here while nobody else can be asked."""
        if self.down_reason is None:
            try:
                return await self._shared.uses(scopes)
            except DependencyError as error:
                self._lost(error)
        return self._own.uses(scopes, gateway=self._gateway, now=self._clock.now())

    async def heartbeat(self, *, lease_s: float) -> Heartbeat:
        """Renew the lease; when the store has returned, deliver what it has missed or forgotten."""
        try:
            beat = await self._shared.heartbeat(lease_s=lease_s)
            await self._deliver()
            # After it: what was just delivered is part of what is remembered.
            if not beat.was_known:
                await self._shared.recall(self._remembered())
        except DependencyError as error:
            self._lost(error)
            return Heartbeat(self.num_gateways, was_known=True)
        if self.down_reason is not None:
            log.warning("limits are shared again: the state store answers")
        self.down_reason = None
        self._note_gateways(beat, lease_s)
        return beat

    async def exchange(self, notice: Notice) -> Exchanged:
        """Exchange notices; alone, nobody is heard, and only what is earned here can be spent."""
        if self.down_reason is None:
            try:
                return await self._shared.exchange(notice)
            except DependencyError as error:
                self._lost(error)
        return Exchanged(None, {})

    async def recall(self, accounts: Sequence[Spent]) -> None:
        """Raise what was spent to at least this."""
        await self._shared.recall(accounts)

    async def close(self) -> None:
        """Deliver what is left if the store can take it, and release connections."""
        try:
            await self._deliver()
            await self._shared.close()
        except DependencyError as error:
            log.error("usage of %d requests is lost: %s", len(self._undelivered), error)

    def _remembered(self) -> list[Spent]:
        """Return what scopes have spent: as last told, and what came in here since."""
        accounts = []
        for scope, seen in self._seen.items():
            day, month = seen.periods.day, seen.periods.month
            day_tokens = seen.day_tokens + self._own.spent(scope, day) - seen.own_day_tokens
            month_tokens = seen.month_tokens + self._own.spent(scope, month) - seen.own_month_tokens
            accounts.append(Spent(scope, "day", day, day_tokens))
            accounts.append(Spent(scope, "month", month, month_tokens))
        return accounts

    def _note_gateways(self, beat: Heartbeat, lease_s: float) -> None:
        """Believe in fewer gateways only after a lease: others may be late, as after an outage."""
        now = self._clock.now()
        self._counts = [(at, number) for at, number in self._counts if at > now - lease_s]
        if not beat.was_known:
            self._counts.append((now, self.num_gateways))
        self._counts.append((now, beat.num_gateways))
        self.num_gateways = max(number for _, number in self._counts)

    async def _deliver(self) -> None:
        while self._undelivered:
            number = min(len(self._undelivered), _TOGETHER)
            settlements = [self._undelivered.popleft() for _ in range(number)]
            try:
                await self._shared.settle(*settlements)
            except BaseException:
                self._undelivered.extendleft(reversed(settlements))
                raise

    def _lost(self, error: DependencyError) -> None:
        if self.down_reason is None:
            log.error(
                "limits are enforced by this gateway alone, at 1/%d each: %s",
                self.num_gateways,
                error,
            )
        self.down_reason = str(error)

    def _note(self, claim: Claim, verdict: Verdict) -> None:
        now = self._clock.now()
        if verdict.hit is None:
            self._own.count(claim, gateway=self._gateway, now=now)
        periods = periods_at(now)
        for use in verdict.uses:
            self._seen[use.scope] = _Seen(
                periods,
                use.day_tokens,
                use.month_tokens,
                self._own.spent(use.scope, periods.day),
                self._own.spent(use.scope, periods.month),
            )

    def _share(self, scope: Scope, periods: Periods) -> Scope:
        """Divide limits by the number of gateways; of a budget, only what was left of it."""
        limits, seen = scope.limits, self._seen.get(scope.name)
        day, month = (0, 0), (0, 0)
        if seen is not None and seen.periods.day == periods.day:
            day = seen.day_tokens, seen.own_day_tokens
        if seen is not None and seen.periods.month == periods.month:
            month = seen.month_tokens, seen.own_month_tokens
        return Scope(
            scope.name,
            msgspec.structs.replace(
                limits,
                max_parallel=self._divided(limits.max_parallel),
                requests_per_minute=self._divided(limits.requests_per_minute),
                tokens_per_minute=self._divided(limits.tokens_per_minute),
                tokens_per_day=self._left(limits.tokens_per_day, *day),
                tokens_per_month=self._left(limits.tokens_per_month, *month),
            ),
        )

    def _divided(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self.num_gateways)

    def _left(self, limit: int | None, fleet_tokens: int, own_tokens: int) -> int | None:
        """Return what this gateway's own spending may come to."""
        if limit is None:
            return None
        return own_tokens + max(0, limit - fleet_tokens) // self.num_gateways
