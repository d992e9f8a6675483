"""`/admin/live`: the state of the fleet as a stream of events, one every two seconds.

What the dashboard and `prefixfleet top` show. It reads and counts; it decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.sse import encode_event
from kvindex.foundation.errors import DependencyError
from router.api.access import ADMIN, is_still_admitted
from router.api.admin import ReplicaState, replica_states
from router.api.counts import TenantCounts, counts_of_all
from router.api.http import json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.config import Limits
from router.observe.decisions import DecisionRecord
from router.tenancy.limits import ScopeUse

EVERY_S = 2.0
MAX_DECISIONS = 50
MAX_TENANTS = 100


class TenantState(TenantCounts, frozen=True, kw_only=True):
    """One tenant: its counts, and what its limits leave; `use` None while nobody can tell."""

    name: str
    limits: Limits
    use: ScopeUse | None


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the fleet, over all processes of a gateway.

    `tenants` are the first ones of `num_tenants`; `decisions` are those of all gateways since the
    look before, oldest first.
    """

    gateway: str
    at: float
    admin: str
    role: str
    num_in_flight: int
    num_waiting: int
    index_reason: str | None
    replicas: list[ReplicaState]
    num_tenants: int
    tenants: list[TenantState]
    decisions: list[DecisionRecord]


class DecisionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/decisions, newest first."""

    decisions: list[DecisionRecord]


async def decisions(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/decisions: the newest of all gateways, of one `?tenant=` if named."""
    given = request.query.get("limit", str(MAX_DECISIONS))
    if not (given.isascii() and given.isdigit() and 0 < int(given) <= 1000):
        raise RequestError("invalid_request", "limit: must be 1 to 1000", param="limit")
    tenant = request.query.get("tenant")
    newest = await request.app[GATEWAY].decisions.newest(int(given), tenant=tenant)
    return json_response(DecisionPage(decisions=newest))


async def live(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/live until the client goes away, or its key is no longer good.

    With `?once=true`, one look as JSON.
    """
    gateway = request.app[GATEWAY]
    if request.query.get("once") == "true":
        return json_response(await look(gateway, request, await _newest(gateway)))
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    await response.prepare(request)
    seen: set[str] = set()
    while not (gateway.admission.draining or gateway.admission.retiring):
        newest = await _newest(gateway)
        state = await look(gateway, request, [r for r in newest if r.unique_id not in seen])
        seen = {record.unique_id for record in newest}
        try:
            await response.write(encode_event(state))
        except ConnectionError:
            break  # The dashboard was closed.
        await asyncio.sleep(EVERY_S)
        if not await is_still_admitted(request):
            break
    return response


async def look(
    gateway: Gateway, request: web.Request, decisions: list[DecisionRecord]
) -> LiveState:
    """Return the state of now, with these decisions."""
    admin = request[ADMIN]
    replicas, counts = await asyncio.gather(replica_states(gateway), counts_of_all(gateway))
    return LiveState(
        gateway=gateway.id,
        at=gateway.clock.now(),
        admin=admin.name,
        role=admin.role,
        num_in_flight=counts.num_in_flight,
        num_waiting=counts.num_waiting,
        index_reason=gateway.view.store_down_reason,
        replicas=replicas,
        num_tenants=len(gateway.directory.tenants),
        tenants=await _tenants(gateway, counts.tenants),
        decisions=decisions,
    )


async def _newest(gateway: Gateway) -> list[DecisionRecord]:
    return (await gateway.decisions.newest(MAX_DECISIONS))[::-1]


async def _tenants(gateway: Gateway, counts: Mapping[str, TenantCounts]) -> list[TenantState]:
    tenants = gateway.directory.tenants[:MAX_TENANTS]
    scopes = [f"tenant/{tenant.name}" for tenant in tenants]
    uses: list[ScopeUse] | None
    try:
        uses = await gateway.tenancy.limiter.uses(scopes)
    except DependencyError:
        uses = None  # The state store is away; the listener's health says so.
    return [
        TenantState(
            name=tenant.name,
            limits=tenant.limits,
            use=uses[i] if uses is not None else None,
            **msgspec.structs.asdict(counts.get(tenant.name, TenantCounts())),
        )
        for i, tenant in enumerate(tenants)
    ]
