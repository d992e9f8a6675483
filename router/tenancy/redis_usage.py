"""Reads the usage that settlements have written to Redis: the stream of records, daily totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from kvindex.redis_connect import dependency_errors
from router.tenancy.redis_state import PREFIX
from router.tenancy.usage import UsagePage, UsageRecord, UsageTotal

_USAGE = f"{PREFIX}usage"
_Group = tuple[str, str, str]


class RedisUsageLog:
    """`UsageLog` over a Redis >= 6.2 or Valkey server; it does not own the client."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def page(self, *, after: str | None, since: float, limit: int) -> UsagePage:
        """Return records by the instant of their writing, which follows that of their end."""
        start = f"({after}" if after else str(max(0, int(since * 1000)))
        with dependency_errors(self._redis):
            entries: Any = await self._redis.xrange(_USAGE, min=start, count=limit + 1)
        records = [
            msgspec.json.decode(fields[b"r"], type=UsageRecord) for _, fields in entries[:limit]
        ]
        cursor = entries[limit - 1][0].decode() if len(entries) > limit else None
        return UsagePage([record for record in records if record.at >= since], cursor)

    async def totals(self, days: Sequence[str]) -> list[UsageTotal]:
        """Return the totals of some days."""
        found: list[UsageTotal] = []
        with dependency_errors(self._redis):
            for day in days:
                fields: Any = await self._redis.hgetall(f"{PREFIX}totals:{day}")
                found += _totals(day, fields)
        return found


def _totals(day: str, fields: dict[bytes, bytes]) -> list[UsageTotal]:
    groups: dict[tuple[str, str, str], dict[str, int]] = {}
    for field, number in fields.items():
        name, _, group = field.partition(b":")
        sums = groups.setdefault(msgspec.json.decode(group, type=_Group), {})
        sums[name.decode()] = int(number)
    return [
        UsageTotal(day=day, tenant=tenant, key=key, model=model, **groups[tenant, key, model])
        for tenant, key, model in sorted(groups)
    ]
