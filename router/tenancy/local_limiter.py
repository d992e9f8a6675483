"""Limits in this process: the same rules as in Redis, for a gateway that has none, and for tests.

It also keeps the usage records that settlements bring, as far back as they fit into memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvindex.foundation.clock import Clock
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import (
    Claim,
    Exchanged,
    Heartbeat,
    Notice,
    ScopeUse,
    Settlement,
    Spent,
    Verdict,
)
from router.tenancy.periods import periods_at
from router.tenancy.usage import SUMS, UsagePage, UsageRecord, UsageTotal, sums_of

_MAX_RECORDS = 10_000


class LocalLimiter:
    """`Limiter` and `UsageLog` in memory; several gateways may share one ledger."""

    def __init__(self, ledger: LimitLedger, *, gateway: str, clock: Clock) -> None:
        self._ledger = ledger
        self._gateway = gateway
        self._clock = clock
        self._records: deque[tuple[int, UsageRecord]] = deque(maxlen=_MAX_RECORDS)
        self._num_records = 0

    async def reserve(self, claim: Claim) -> Verdict:
        """Count a claim in all of its scopes, or in none."""
        return self._ledger.reserve(claim, gateway=self._gateway, now=self._clock.now())

    async def settle(self, *settlements: Settlement) -> None:
        """Replace claims by what was really used."""
        for settlement in settlements:
            is_first = self._ledger.settle(settlement, now=self._clock.now())
            if is_first and settlement.usage is not None:
                self._num_records += 1
                self._records.append((self._num_records, settlement.usage))

    async def uses(self, scopes: Sequence[str]) -> list[ScopeUse]:
        """Tell what scopes have used."""
        return self._ledger.uses(scopes, gateway=self._gateway, now=self._clock.now())

    async def heartbeat(self, *, lease_s: float) -> Heartbeat:
        """Renew this gateway's lease."""
        return self._ledger.renew(self._gateway, now=self._clock.now(), lease_s=lease_s)

    async def exchange(self, notice: Notice) -> Exchanged:
        """Tell the other live gateways a notice, hear theirs, and take a part of all retries."""
        return self._ledger.exchange(notice, gateway=self._gateway, now=self._clock.now())

    async def recall(self, accounts: Sequence[Spent]) -> None:
        """Raise what was spent to at least this."""
        for account in accounts:
            self._ledger.recall(account)

    async def page(self, *, after: str | None, since: float, limit: int) -> UsagePage:
        """Return records that are still in memory."""
        first = int(after) if after else 0
        found = [(i, r) for i, r in self._records if i > first and r.at >= since]
        cursor = str(found[limit - 1][0]) if len(found) > limit else None
        return UsagePage([record for _, record in found[:limit]], cursor)

    async def totals(self, days: Sequence[str]) -> list[UsageTotal]:
        """Add up the records that are still in memory."""
        sums: dict[tuple[str, str, str, str], dict[str, int]] = {}
        for _, record in self._records:
            group = (periods_at(record.at).day, record.tenant, record.key, record.model)
            if group[0] in days:
                total = sums.setdefault(group, dict.fromkeys(SUMS, 0))
                for name, number in sums_of(record).items():
                    total[name] += number
        return [
            UsageTotal(day=day, tenant=tenant, key=key, model=model, **total)
            for (day, tenant, key, model), total in sorted(sums.items())
        ]

    async def close(self) -> None:
        """Do nothing."""
