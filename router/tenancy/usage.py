"""What each request used, for bills and reports: the record, its totals, and where they are read.

Records are written together with the settlement of a request's claim, so that none is counted
twice. It knows no prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

Outcome = Literal["ok", "cancelled", "failed"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its tenant is charged for it.

    `at` is its end, in seconds since the Unix epoch. Tokens are those that the replica reported or,
    for a stream that was cut off, those that had run by then. `queue_s` is the time from arrival to
    the replica that served it; `ttft_s` None when no token came. `key` is the alias of the key,
    `user` what the client sent as such.
    """

    at: float
    request_id: str
    tenant: str
    key: str
    model: str
    uncached_tokens: int
    cached_tokens: int
    output_tokens: int
    charged_tokens: int
    queue_s: float | None
    ttft_s: float | None
    duration_s: float
    status: int
    outcome: Outcome
    user: str | None = None


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of a day (UTC) of one tenant, key and model."""

    day: str
    tenant: str
    key: str
    model: str
    requests: int = 0
    uncached_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    charged_tokens: int = 0


class UsagePage(NamedTuple):
    """Records, oldest first, and the cursor that continues after them (None at the end)."""

    records: list[UsageRecord]
    next: str | None


SUMS = ("requests", "uncached_tokens", "cached_tokens", "output_tokens", "charged_tokens")
"""The fields of a total that are summed up."""


class UsageLog(Protocol):
    """Reads what settlements have written; DependencyError when unreachable."""

    async def page(self, *, after: str | None, since: float, limit: int) -> UsagePage:
        """Return up to `limit` records that ended at or after `since` and follow a cursor."""
        ...

    async def totals(self, days: Sequence[str]) -> list[UsageTotal]:
        """Return the totals of some days, in the order of day, tenant, key and model."""
        ...


def sums_of(record: UsageRecord) -> dict[str, int]:
    """Return what a record adds to the total of its day."""
    return {"requests": 1, **{name: getattr(record, name) for name in SUMS[1:]}}
