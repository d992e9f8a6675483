"""Usage: `/v1/usage` for whoever holds a key, `/admin/usage` and the audit log for operators.

A key sees its own usage and what is left of the limits that it falls under, nobody else's.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from router.api.access import ADMIN
from router.api.http import json_response
from router.api.openai import GATEWAY
from router.config import Limits
from router.request.auth import bearer_key
from router.tenancy.limits import ScopeUse
from router.tenancy.periods import periods_at
from router.tenancy.usage import UsageRecord, UsageTotal

_MAX_DAYS = 400
_DEFAULT_DAYS = 31
_MAX_RECORDS = 1000


class LimitState(msgspec.Struct, frozen=True, kw_only=True):
    """One set of limits, of "tenant" or "key", and what is used of it."""

    of: str
    limits: Limits
    requests_last_minute: int
    tokens_last_minute: int
    running: int
    tokens_today: int
    tokens_this_month: int


class OwnUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /v1/usage: totals are those of this key, by day (UTC) and model."""

    tenant: str
    key: str
    limits: list[LimitState]
    totals: list[UsageTotal]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/usage."""

    totals: list[UsageTotal]


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/usage/records; ask again with `after` = `next` until it is null."""

    records: list[UsageRecord]
    next: str | None


async def own(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/usage."""
    gateway = request.app[GATEWAY]
    identity = await gateway.tenancy.identify_now(bearer_key(request.headers))
    scopes = identity.scopes
    uses = await gateway.tenancy.limiter.uses([scope.name for scope in scopes])
    totals = await gateway.tenancy.usage.totals(_days(request, gateway.clock.now()))
    return json_response(
        OwnUsage(
            tenant=identity.tenant.name,
            key=identity.key_alias,
            limits=[_state(s.limits, use) for s, use in zip(scopes, uses, strict=True)],
            totals=[
                total
                for total in totals
                if (total.tenant, total.key) == (identity.tenant.name, identity.key_alias)
            ],
        )
    )


async def totals(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/usage?since=2026-11-01&until=2026-11-30&tenant=NAME."""
    gateway = request.app[GATEWAY]
    found = await gateway.tenancy.usage.totals(_days(request, gateway.clock.now()))
    tenant = _tenant(request)
    return json_response(Totals(totals=[t for t in found if tenant in (None, t.tenant)]))


async def records(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/usage/records?since=2026-11-01&tenant=NAME&after=CURSOR&limit=N."""
    gateway = request.app[GATEWAY]
    day = _day(request, "since")
    page = await gateway.tenancy.usage.page(
        after=request.query.get("after"),
        since=day.timestamp() if day is not None else 0.0,
        limit=_limit(request),
    )
    tenant = _tenant(request)
    wanted = [record for record in page.records if tenant in (None, record.tenant)]
    return json_response(Records(records=wanted, next=page.next))


async def audit(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/audit?limit=N with the newest records first."""
    store = request.app[GATEWAY].tenancy.live.store
    return json_response({"records": await store.audits(limit=_limit(request))})


def _state(limits: Limits, use: ScopeUse) -> LimitState:
    return LimitState(
        of=use.scope.partition("/")[0],
        limits=limits,
        requests_last_minute=use.num_requests,
        tokens_last_minute=use.num_tokens,
        running=use.num_running,
        tokens_today=use.day_tokens,
        tokens_this_month=use.month_tokens,
    )


def _tenant(request: web.Request) -> str | None:
    """Return the tenant to show; a tenant-admin sees its own whatever it asks for."""
    return request[ADMIN].tenant or request.query.get("tenant")


def _days(request: web.Request, now: float) -> list[str]:
    """Return the days from `since` (a month back) to `until` (today), both included."""
    today = datetime.fromtimestamp(now, UTC)
    until = _day(request, "until") or today
    since = _day(request, "since") or until - timedelta(days=_DEFAULT_DAYS - 1)
    number = math.floor((until - since) / timedelta(days=1)) + 1
    if not 0 < number <= _MAX_DAYS:
        raise RequestError(
            "invalid_request", f"since: at most {_MAX_DAYS} days before `until`", param="since"
        )
    return [periods_at((since + timedelta(days=i)).timestamp()).day for i in range(number)]


def _day(request: web.Request, name: str) -> datetime | None:
    text = request.query.get(name)
    if text is None:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise RequestError(
            "invalid_request", f"{name}: a day such as 2026-11-29, not {text!r}", param=name
        ) from None


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(_MAX_RECORDS))
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_RECORDS:
        raise RequestError(
            "invalid_request", f"limit: a number from 1 to {_MAX_RECORDS}", param="limit"
        )
    return int(text)
