"""The last decisions, so that each can be explained: this gateway's here, all gateways' in Redis.

Bounded; nothing of a prompt is in them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol

import msgspec

from kvindex.foundation.errors import DependencyError
from router.observe.causes import Cause
from router.request.job import AttemptRecord
from router.request.usage import RealisedUsage


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: what was decided, and what really happened.

    `at` is in seconds since the Unix epoch; `ttft_s` None when no token came. `unique_id` is what
    replicas logged it under. Of the prompt, `num_predicted_tokens` were cached where it was served,
    `num_available_tokens` where most was; `cause` tells why the realised number (in `usage`) is
    another. `queue_s` it waited for a place; `num_resumes` times its answer went on elsewhere.
    """

    request_id: str
    unique_id: str
    at: float
    tenant: str
    model: str
    status: int
    num_prompt_tokens: int | None
    num_predicted_tokens: int | None
    usage: RealisedUsage | None
    ttft_s: float | None
    duration_s: float
    attempts: list[AttemptRecord]
    gateway: str = ""
    num_available_tokens: int | None = None
    cause: Cause | None = None
    queue_s: float | None = None
    num_resumes: int = 0


class DecisionStore(Protocol):
    """Where other gateways find decisions, and this one finds theirs."""

    def add(self, record: DecisionRecord) -> None: ...

    async def flush(self) -> None: ...

    async def get(self, request_id: str) -> DecisionRecord | None: ...

    async def newest(self, count: int, *, tenant: str | None) -> list[DecisionRecord]: ...

    async def close(self) -> None: ...


class DecisionLog:
    """Records by request id; the oldest make room, and of equal ids the newest is kept."""

    def __init__(self, *, max_records: int, shared: DecisionStore | None = None) -> None:
        self._max_records = max_records
        self._shared = shared
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def add(self, record: DecisionRecord) -> None:
        """Keep a record."""
        if self._shared is not None:
            self._shared.add(record)
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> DecisionRecord | None:
        """Return the record of a request of this process, None when unknown or too old."""
        return self._records.get(request_id)

    async def newest(self, count: int, *, tenant: str | None = None) -> list[DecisionRecord]:
        """Return the newest records of all gateways, newest first.

        While the store that all share is away, they are those of this process.
        """
        found = {record.unique_id: record for record in self._own(count, tenant)}
        if self._shared is not None:
            try:
                others = await self._shared.newest(count, tenant=tenant)
            except DependencyError:
                others = []  # Flushing says so, once; the fleet's state names the reason.
            found |= {record.unique_id: record for record in others}
        return sorted(found.values(), key=lambda record: -record.at)[:count]

    def _own(self, count: int, tenant: str | None) -> list[DecisionRecord]:
        newest = (r for r in reversed(self._records.values()) if tenant in (None, r.tenant))
        return list(islice(newest, count))

    async def find(self, request_id: str) -> DecisionRecord | None:
        """Return the record of any gateway's request, None when it is unknown or too old.

        Raises DependencyError while the store that all share is away.
        """
        record = self.get(request_id)
        if record is not None or self._shared is None:
            return record
        return await self._shared.get(request_id)

    async def flush(self) -> None:
        """Let other gateways know what was added."""
        if self._shared is not None:
            await self._shared.flush()

    async def close(self) -> None:
        """Deliver what waits and release connections."""
        if self._shared is not None:
            await self._shared.close()
