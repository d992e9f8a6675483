"""Decisions in Redis, so that any process of any gateway can explain any recent request.

Records go there in batches, after their requests have ended; those that cannot be delivered are
dropped, oldest first. Bounded in number and time; nothing of a prompt is in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import islice
from typing import Any

import msgspec
from redis.asyncio import Redis

from kvindex.foundation.errors import DependencyError
from kvindex.redis_connect import dependency_errors
from kvindex.redis_script import RedisScript
from router.observe.decisions import DecisionRecord

log = logging.getLogger("prefixfleet.router")

FLUSH_S = 0.25
"""How long a record may wait for others to travel with."""
_KEPT_S = 3600.0
_MAX_WAITING = 10_000
_BATCH = 256
_PREFIX = "pf:{decisions}:"
_REMEMBER = RedisScript("remember", package="router.observe")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(DecisionRecord)


class SharedDecisions:
    """The newest `max_records` of all gateways, for an hour. The client is closed with it."""

    def __init__(self, redis: Redis, *, max_records: int) -> None:
        self._redis = redis
        self._max_records = max_records
        self._waiting: deque[DecisionRecord] = deque(maxlen=_MAX_WAITING)
        self._is_away = False

    def add(self, record: DecisionRecord) -> None:
        """Let a record go with the next `flush`."""
        self._waiting.append(record)

    async def flush(self) -> None:
        """Deliver what waits; what a server that is away does not take waits on, bounded."""
        while self._waiting:
            batch = list(islice(self._waiting, _BATCH))
            words: list[str | bytes] = []
            for record in batch:
                words += (record.request_id, _encoder.encode(record))
            try:
                await _REMEMBER.run(
                    self._redis, _PREFIX, round(_KEPT_S * 1000), self._max_records, *words
                )
            except DependencyError as error:
                self._note_away(error)
                return
            self._is_away = False
            delivered = {record.unique_id for record in batch}
            while self._waiting and self._waiting[0].unique_id in delivered:
                self._waiting.popleft()

    async def get(self, request_id: str) -> DecisionRecord | None:
        """Return a record; one that is on its way is waited for. Raises DependencyError."""
        found = await self._get(request_id)
        if found is None:
            await asyncio.sleep(2 * FLUSH_S)
            found = await self._get(request_id)
        return None if found is None else _decoder.decode(found)

    async def newest(self, count: int, *, tenant: str | None) -> list[DecisionRecord]:
        """Return the newest of all gateways, newest first. Raises DependencyError."""
        found: dict[str, DecisionRecord] = {}
        batch = count if tenant is None else _BATCH
        end = -1
        while len(found) < count:
            records = await self._slice(end - batch + 1, end)
            if not records:
                break
            for record in reversed(records):
                if tenant in (None, record.tenant):
                    found.setdefault(record.unique_id, record)
            end -= batch
        return list(islice(found.values(), count))

    async def close(self) -> None:
        """Deliver what waits, if that can be, and release connections."""
        await self.flush()
        with dependency_errors(self._redis):
            await self._redis.aclose()

    async def _get(self, request_id: str) -> bytes | None:
        with dependency_errors(self._redis):
            found: Any = await self._redis.get(f"{_PREFIX}of:{request_id}")
        return found  # type: ignore[no-any-return]  # redis-py types it for both kinds of answer

    async def _slice(self, start: int, end: int) -> list[DecisionRecord]:
        """Return what two places of the list of ids enclose, both included, oldest first."""
        with dependency_errors(self._redis):
            ids: Any = await self._redis.lrange(f"{_PREFIX}ids", start, end)
            if not ids:
                return []
            packed: Any = await self._redis.mget([f"{_PREFIX}of:{id.decode()}" for id in ids])
        return [_decoder.decode(one) for one in packed if one is not None]

    def _note_away(self, error: DependencyError) -> None:
        if not self._is_away:
            log.warning("decisions are kept by this gateway alone: %s", error)
        self._is_away = True
