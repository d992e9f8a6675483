"""The rules of all limits, in memory: what lua/reserve.lua and lua/settle.lua do in Redis.

Synchronous and without a clock, so that a test can move the time. A rule that is changed here is
changed there: tests/contracts/test_limiter.py holds both to the same numbers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.config import Limits
from router.tenancy.limits import (
    WINDOW_S,
    Claim,
    Exchanged,
    Heartbeat,
    LimitHit,
    LimitKind,
    Notice,
    ScopeUse,
    Settlement,
    Spent,
    Verdict,
    fixed_wait_s,
    limits_by_kind,
)
from router.tenancy.periods import Periods, periods_at

_MAX_SETTLED = 10_000


@dataclass(slots=True)
class _Bucket:
    """What was claimed within one second."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Account:
    """One scope. `spent` goes by day and month, `running` by gateway.

    `num_requests` and `num_tokens` are the sums of the buckets; none of them had left the window at
    the second `cleared_at`.
    """

    buckets: dict[int, _Bucket] = field(default_factory=dict)
    num_requests: int = 0
    num_tokens: int = 0
    cleared_at: int | None = None
    spent: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    def add(self, second: int, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Count something in the bucket of a second."""
        bucket = self.buckets.get(second)
        if bucket is None:
            bucket = self.buckets[second] = _Bucket()
        bucket.num_requests += num_requests
        bucket.num_tokens += num_tokens
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def clear(self, second: int) -> None:
        """Forget what has left the window; a look at the buckets once a second is enough."""
        if second == self.cleared_at:
            return
        self.cleared_at = second
        for at in [at for at in self.buckets if second - at > WINDOW_S]:
            gone = self.buckets.pop(at)
            self.num_requests -= gone.num_requests
            self.num_tokens -= gone.num_tokens


@dataclass(slots=True, frozen=True)
class _Claimed:
    """Where a claim was counted, so that it can be settled there."""

    gateway: str
    num_tokens: int
    second: int
    periods: Periods


class LimitLedger:
    """All accounts of a fleet, or of one gateway while it is on its own."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._claims: dict[str, _Claimed] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._leases: dict[str, float] = {}
        self._retries: float | None = None
        self._granted: dict[str, tuple[float, Notice]] = {}

    def reserve(self, claim: Claim, *, gateway: str, now: float) -> Verdict:
        """Count a claim in all of its scopes, or in none."""
        periods = periods_at(now)
        accounts = [self._account_now(scope.name, gateway, now) for scope in claim.scopes]
        hit = None
        if claim.id not in self._claims and claim.id not in self._settled:
            hit = _first_hit(claim, accounts, periods, now)
            if hit is None:
                self._count(claim, accounts, gateway, periods, now)
        uses = [
            _use(scope.name, account, periods, now)
            for scope, account in zip(claim.scopes, accounts, strict=True)
        ]
        return Verdict(uses=tuple(uses), hit=hit)

    def count(self, claim: Claim, *, gateway: str, now: float) -> None:
        """Count a claim without asking whether it fits."""
        accounts = [self._account_now(scope.name, gateway, now) for scope in claim.scopes]
        self._count(claim, accounts, gateway, periods_at(now), now)

    def _count(
        self,
        claim: Claim,
        accounts: Sequence[_Account],
        gateway: str,
        periods: Periods,
        now: float,
    ) -> None:
        second = math.floor(now)
        self._claims[claim.id] = _Claimed(gateway, claim.num_tokens, second, periods)
        for account in accounts:
            account.add(second, num_requests=1, num_tokens=claim.num_tokens)
            account.running[gateway] = account.running.get(gateway, 0) + 1
            for period in (periods.day, periods.month):
                account.spent[period] = account.spent.get(period, 0) + claim.num_tokens

    def settle(self, settlement: Settlement, *, now: float) -> bool:
        """Replace a claim by what was used; False when that has been done before."""
        if settlement.id in self._settled:
            return False
        self._settled[settlement.id] = None
        if len(self._settled) > _MAX_SETTLED:
            self._settled.popitem(last=False)
        claimed = self._claims.pop(settlement.id, None)
        unknown = _Claimed("", 0, math.floor(now), periods_at(now))
        for scope in settlement.scopes:
            self._settle_account(
                self._account(scope), claimed or unknown, settlement.num_tokens, math.floor(now)
            )
        return True

    def uses(self, scopes: Sequence[str], *, gateway: str, now: float) -> list[ScopeUse]:
        """Tell what scopes have used."""
        periods = periods_at(now)
        return [
            _use(scope, self._account_now(scope, gateway, now), periods, now) for scope in scopes
        ]

    def spent(self, scope: str, period: str) -> int:
        """Return the tokens that a scope was charged for in a day or month."""
        return self._account(scope).spent.get(period, 0)

    def renew(self, gateway: str, *, now: float, lease_s: float) -> Heartbeat:
        """Renew the lease of a gateway."""
        self._leases = {name: until for name, until in self._leases.items() if until > now}
        was_known = gateway in self._leases
        self._leases[gateway] = now + lease_s
        return Heartbeat(len(self._leases), was_known)

    def exchange(self, notice: Notice, *, gateway: str, now: float) -> Exchanged:
        """Keep a gateway's notice, return the others', and grant it a part of all retries."""
        live = {name for name, until in self._leases.items() if until > now} | {gateway}
        left = notice.burst if self._retries is None else self._retries
        for name, (granted, old) in list(self._granted.items()):
            if name == gateway:
                left += granted + notice.earned - old.earned - notice.spent + old.spent
            elif name not in live:
                left += granted
                del self._granted[name]
        others = {name: of for name, of in self._granted.items() if name != gateway}
        elsewhere = sum(granted for granted, _ in others.values())
        left = max(0.0, min(left, notice.burst - elsewhere))
        granted = min(left, max(1.0, left / len(live)))
        self._retries = left - granted
        self._granted[gateway] = granted, notice
        return Exchanged(granted, {name: said.says for name, (_, said) in others.items()})

    def recall(self, spent: Spent) -> None:
        """Raise what a scope has spent to at least this."""
        account = self._account(spent.scope)
        account.spent[spent.period] = max(account.spent.get(spent.period, 0), spent.num_tokens)

    def _account(self, scope: str) -> _Account:
        account = self._accounts.get(scope)
        if account is None:
            account = self._accounts[scope] = _Account()
        return account

    def _account_now(self, scope: str, gateway: str, now: float) -> _Account:
        """Return an account without what counts no more."""
        account = self._account(scope)
        account.clear(math.floor(now))
        if not account.running.keys() <= {gateway}:
            account.running = {
                name: number
                for name, number in account.running.items()
                if name == gateway or self._leases.get(name, 0.0) > now
            }
        return account

    def _settle_account(
        self, account: _Account, claimed: _Claimed, num_tokens: int, second: int
    ) -> None:
        if account.running.get(claimed.gateway, 0) > 0:
            account.running[claimed.gateway] -= 1
        difference = num_tokens - claimed.num_tokens
        for period in (claimed.periods.day, claimed.periods.month):
            account.spent[period] = account.spent.get(period, 0) + difference
        if difference > 0:
            account.add(second, num_tokens=difference)
        elif claimed.second in account.buckets:
            account.add(claimed.second, num_tokens=difference)


def _use(scope: str, account: _Account, periods: Periods, now: float) -> ScopeUse:
    buckets = account.buckets
    return ScopeUse(
        scope=scope,
        num_requests=account.num_requests,
        num_tokens=account.num_tokens,
        reset_s=max(buckets) + WINDOW_S + 1 - now if buckets else 0.0,
        num_running=sum(account.running.values()),
        day_tokens=account.spent.get(periods.day, 0),
        month_tokens=account.spent.get(periods.month, 0),
    )


def _first_hit(
    claim: Claim, accounts: Sequence[_Account], periods: Periods, now: float
) -> LimitHit | None:
    for scope, account in zip(claim.scopes, accounts, strict=True):
        kind = _exceeded(scope.limits, account, periods, claim.num_tokens)
        if kind is not None:
            limit = limits_by_kind(scope.limits)[kind]
            retry_after_s = _retry_after_s(account, kind, limit, claim, periods, now)
            return LimitHit(scope=scope.name, kind=kind, limit=limit, retry_after_s=retry_after_s)
    return None


def _retry_after_s(
    account: _Account,
    kind: LimitKind,
    limit: int,
    claim: Claim,
    periods: Periods,
    now: float,
) -> float:
    fixed_s = fixed_wait_s(kind, periods)
    if fixed_s is not None:
        return fixed_s
    sizes = [
        (at, bucket.num_requests if kind == "requests" else bucket.num_tokens)
        for at, bucket in sorted(account.buckets.items())
    ]
    excess = sum(size for _, size in sizes) - limit
    excess += 1 if kind == "requests" else claim.num_tokens
    return wait_s(sizes, excess=excess, now=now)


def wait_s(sizes: Sequence[tuple[int, int]], *, excess: int, now: float) -> float:
    """Return the seconds until `excess` has left the window, or all that is in it.

    `sizes` are (second, size), oldest first. What is larger than the limit by itself never fits;
    then it is the length of the window.
    """
    freed = 0
    for at, size in sizes:
        freed += size
        if freed >= excess:
            return at + WINDOW_S + 1 - now
    return float(WINDOW_S)


def _exceeded(
    limits: Limits, account: _Account, periods: Periods, num_tokens: int
) -> LimitKind | None:
    """Return the first limit, in a fixed order, that one more claim would exceed."""
    used: dict[LimitKind, int] = {
        "parallel": sum(account.running.values()) + 1,
        "requests": account.num_requests + 1,
        "tokens": account.num_tokens + num_tokens,
        "day": account.spent.get(periods.day, 0) + num_tokens,
        "month": account.spent.get(periods.month, 0) + num_tokens,
    }
    for kind, limit in limits_by_kind(limits).items():
        if used[kind] > limit:
            return kind
    return None
