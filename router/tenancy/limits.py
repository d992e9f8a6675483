"""The limiter as its users see it: claims, verdicts, settlements, and the Protocol.

The rules themselves are in limit_ledger.py (in memory) and lua/reserve.lua (in Redis); one contract
suite holds both to them. It knows no HTTP and no configuration files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import msgspec

from router.config import Limits
from router.tenancy.periods import Periods
from router.tenancy.usage import UsageRecord

WINDOW_S = 60
"""Requests and tokens are counted over this long. Counting goes by whole seconds, so that what was
claimed leaves the window after 60 to 61 s: never sooner."""

PARALLEL_RETRY_S = 1.0
"""Nobody knows when a running request ends; clients are asked to look again this soon."""

LimitKind = Literal["parallel", "requests", "tokens", "day", "month"]


class Scope(NamedTuple):
    """Whom limits hold for: `tenant/NAME`, or `key/HASH` for one key's own."""

    name: str
    limits: Limits


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for: `num_tokens` to be charged as far as can be told beforehand."""

    id: str
    scopes: tuple[Scope, ...]
    num_tokens: int


class ScopeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a scope has used, the claim included if it was admitted.

    `reset_s`: seconds until nothing of the last minute counts any more, 0 when nothing does.
    """

    scope: str
    num_requests: int
    num_tokens: int
    reset_s: float
    num_running: int
    day_tokens: int
    month_tokens: int


class LimitHit(msgspec.Struct, frozen=True, kw_only=True):
    """Why a claim was refused: which limit of which scope, and when to try again."""

    scope: str
    kind: LimitKind
    limit: int
    retry_after_s: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a claim; admitted when `hit` is None. `uses` are in the order of the scopes.

    `directory` is the mark of the tenants and keys in the same store ("" when it holds none), None
    where it is another.
    """

    uses: tuple[ScopeUse, ...]
    hit: LimitHit | None = None
    directory: str | None = None


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a claim: the charged tokens, and the record for the tenant's bill."""

    id: str
    scopes: tuple[str, ...]
    num_tokens: int
    usage: UsageRecord | None = None


class Spent(NamedTuple):
    """What a scope was charged in a day (`2026-11-29`) or month (`2026-11`)."""

    scope: str
    kind: Literal["day", "month"]
    period: str
    num_tokens: int


class Heartbeat(NamedTuple):
    """Answer to a gateway's heartbeat: how many gateways live, and whether it was one of them."""

    num_gateways: int
    was_known: bool


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway tells the others: its retries, and whatever `says` means to them.

    `burst` bounds the retries of the fleet; `earned` and `spent` are totals since its start.
    """

    burst: float
    earned: float
    spent: int
    says: str = ""


class Exchanged(NamedTuple):
    """The answer: what the others say, by name, and the retries that may be spent until the next.

    `retries` None: nobody was reached, so that what is left of them holds.
    """

    retries: float | None
    others: dict[str, str]


class Limiter(Protocol):
    """Atomic limits over requests, tokens and parallelism; DependencyError when unreachable."""

    async def reserve(self, claim: Claim) -> Verdict:
        """Count a claim in all of its scopes, or in none. Idempotent by id."""
        ...

    async def settle(self, *settlements: Settlement) -> None:
        """Replace claims by what was really used. Idempotent by id.

        More than was claimed is debt: it counts from now on. A claim that the store does not know
        (made while it was down, or lost with it) is charged in full.
        """
        ...

    async def uses(self, scopes: Sequence[str]) -> list[ScopeUse]:
        """Tell what scopes have used, without counting anything."""
        ...

    async def heartbeat(self, *, lease_s: float) -> Heartbeat:
        """Renew this gateway's lease; what a lapsed one had running is no longer counted."""
        ...

    async def exchange(self, notice: Notice) -> Exchanged:
        """Tell the other live gateways a notice, hear theirs, and take a part of all retries.

        What is left of the part that was taken last is put back first.
        """
        ...

    async def recall(self, accounts: Sequence[Spent]) -> None:
        """Raise what was spent to at least this, in a store that may have been emptied."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


@lru_cache(maxsize=4096)
def limits_by_kind(limits: Limits) -> Mapping[LimitKind, int]:
    """Return the limits that are set, in the order in which they are checked."""
    numbers: dict[LimitKind, int | None] = {
        "parallel": limits.max_parallel,
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
        "day": limits.tokens_per_day,
        "month": limits.tokens_per_month,
    }
    return {kind: number for kind, number in numbers.items() if number is not None}


def fixed_wait_s(kind: LimitKind, periods: Periods) -> float | None:
    """Return the seconds to wait after a hit; None where the window of a minute decides it."""
    waits: dict[LimitKind, float] = {
        "parallel": PARALLEL_RETRY_S,
        "day": periods.day_left_s,
        "month": periods.month_left_s,
    }
    return waits.get(kind)
