"""Limits in Redis: one script per operation, so that any number of gateways share them exactly.

The rules are in lua/reserve.lua and lua/settle.lua. Time comes from the caller's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from kvindex.foundation.clock import Clock
from kvindex.redis_connect import dependency_errors
from router.tenancy.limits import (
    WINDOW_S,
    Claim,
    Exchanged,
    Heartbeat,
    LimitHit,
    LimitKind,
    Notice,
    Scope,
    ScopeUse,
    Settlement,
    Spent,
    Verdict,
    fixed_wait_s,
    limits_by_kind,
)
from router.tenancy.periods import Periods, periods_at
from router.tenancy.redis_state import PREFIX, state_script
from router.tenancy.usage import UsageRecord, sums_of

MAX_USAGE_RECORDS = 200_000
TOTALS_KEPT_DAYS = 400

_RESERVE = state_script("reserve")
_SETTLE = state_script("settle")
_USES = state_script("uses")
_HEARTBEAT = state_script("heartbeat")
_EXCHANGE = state_script("exchange")
_RECALL = state_script("recall")

_json = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()


class _ScopeCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One scope in a call of lua/reserve.lua."""

    scope: str
    parallel: int | None = None
    requests: int | None = None
    tokens: int | None = None
    day: int | None = None
    month: int | None = None


class _ReserveCall(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of lua/reserve.lua."""

    id: str
    gateway: str
    now: float
    tokens: int
    day: str
    month: str
    scopes: list[_ScopeCall]


class _SettleCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One argument of lua/settle.lua."""

    id: str
    now: float
    tokens: int
    day: str
    month: str
    scopes: tuple[str, ...]
    record: str | None = None
    record_day: str | None = None
    group: str | None = None
    sums: dict[str, int] = {}
    max_records: int | None = None
    kept_days: int | None = None


class _ExchangeCall(Notice, frozen=True, kw_only=True):
    """The argument of lua/exchange.lua."""

    gateway: str
    now: float


class RedisLimiter:
    """`Limiter` over a Redis >= 6.2 or Valkey server; the client is closed with it."""

    def __init__(self, redis: Redis, *, gateway: str, clock: Clock) -> None:
        self._redis = redis
        self._gateway = gateway
        self._clock = clock

    async def reserve(self, claim: Claim) -> Verdict:
        """Count a claim in all of its scopes, or in none."""
        now = self._clock.now()
        periods = periods_at(now)
        call = _ReserveCall(
            id=claim.id,
            gateway=self._gateway,
            now=now,
            tokens=claim.num_tokens,
            day=periods.day,
            month=periods.month,
            scopes=[_scope_call(scope) for scope in claim.scopes],
        )
        version, refusal, uses = await _RESERVE.run(self._redis, PREFIX, _packer.encode(call))
        names = [scope.name for scope in claim.scopes]
        return Verdict(
            uses=tuple(_uses(names, uses, now)),
            hit=_hit(claim, refusal, periods) if refusal else None,
            directory=version.decode(),
        )

    async def settle(self, *settlements: Settlement) -> None:
        """Replace claims by what was really used, and write their usage records."""
        now = self._clock.now()
        calls = [_packer.encode(_settle_call(settlement, now)) for settlement in settlements]
        await _SETTLE.run(self._redis, PREFIX, *calls)

    async def uses(self, scopes: Sequence[str]) -> list[ScopeUse]:
        """Tell what scopes have used, without counting anything."""
        now = self._clock.now()
        periods = periods_at(now)
        uses = await _USES.run(
            self._redis, PREFIX, self._gateway, repr(now), periods.day, periods.month, *scopes
        )
        return _uses(scopes, uses, now)

    async def heartbeat(self, *, lease_s: float) -> Heartbeat:
        """Renew this gateway's lease."""
        number, known = await _HEARTBEAT.run(
            self._redis, PREFIX, self._gateway, repr(self._clock.now()), repr(lease_s)
        )
        return Heartbeat(int(number), bool(known))

    async def exchange(self, notice: Notice) -> Exchanged:
        """Tell the other live gateways a notice, hear theirs, and take a part of all retries."""
        call = _ExchangeCall(
            gateway=self._gateway, now=self._clock.now(), **msgspec.structs.asdict(notice)
        )
        retries, flat = await _EXCHANGE.run(self._redis, PREFIX, _packer.encode(call))
        words = [word.decode() for word in flat]
        return Exchanged(float(retries), dict(zip(words[::2], words[1::2], strict=True)))

    async def recall(self, accounts: Sequence[Spent]) -> None:
        """Raise what was spent to at least this."""
        if accounts:
            await _RECALL.run(self._redis, PREFIX, *(word for spent in accounts for word in spent))

    async def close(self) -> None:
        """Release connections."""
        with dependency_errors(self._redis):
            await self._redis.aclose()


def _scope_call(scope: Scope) -> _ScopeCall:
    return _ScopeCall(scope=scope.name, **dict(limits_by_kind(scope.limits)))


def _settle_call(settlement: Settlement, now: float) -> _SettleCall:
    periods = periods_at(now)
    call = _SettleCall(
        id=settlement.id,
        now=now,
        tokens=settlement.num_tokens,
        day=periods.day,
        month=periods.month,
        scopes=settlement.scopes,
    )
    return call if settlement.usage is None else _with_usage(call, settlement.usage)


def _with_usage(call: _SettleCall, usage: UsageRecord) -> _SettleCall:
    return msgspec.structs.replace(
        call,
        record=_json.encode(usage).decode(),
        record_day=periods_at(usage.at).day,
        group=_json.encode((usage.tenant, usage.key, usage.model)).decode(),
        sums=sums_of(usage),
        max_records=MAX_USAGE_RECORDS,
        kept_days=TOTALS_KEPT_DAYS,
    )


def _hit(claim: Claim, refusal: list[bytes], periods: Periods) -> LimitHit:
    scope = claim.scopes[int(refusal[0])]
    kind: LimitKind = msgspec.convert(refusal[1].decode(), LimitKind)
    wait_s = fixed_wait_s(kind, periods)
    return LimitHit(
        scope=scope.name,
        kind=kind,
        limit=limits_by_kind(scope.limits)[kind],
        retry_after_s=float(refusal[2]) if wait_s is None else wait_s,
    )


def _uses(scopes: Sequence[str], raw: list[list[Any]], now: float) -> list[ScopeUse]:
    uses = []
    for scope, (requests, tokens, newest, running, day, month) in zip(scopes, raw, strict=True):
        uses.append(
            ScopeUse(
                scope=scope,
                num_requests=int(requests),
                num_tokens=int(tokens),
                reset_s=int(newest) + WINDOW_S + 1 - now if newest else 0.0,
                num_running=int(running),
                day_tokens=int(day),
                month_tokens=int(month),
            )
        )
    return uses
