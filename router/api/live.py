"""`/admin/live`: the state of the fleet as a stream of events, one every two seconds.

What the dashboard and `prefixfleet top` show. It reads and counts; it decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import msgspec
from aiohttp import web
from prometheus_client import Counter

from engine.frontend.errors import RequestError
from engine.frontend.sse import encode_event
from kvindex.foundation.errors import DependencyError
from router.api.access import ADMIN
from router.api.admin import ReplicaState, replica_states
from router.api.http import json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.config import Limits
from router.observe.decisions import DecisionRecord
from router.tenancy.limits import ScopeUse

EVERY_S = 2.0
MAX_DECISIONS = 50
MAX_TENANTS = 100


class TenantState(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: what this gateway has counted since its start, and what its limits leave.

    Hit tokens: `available` where most of a prompt was held, `predicted` where it was sent,
    `realised` by the replica. `use` None while nobody can tell.
    """

    name: str
    requests: int
    refused: int
    prompt_tokens: int
    completion_tokens: int
    charged_tokens: int
    available_tokens: int
    predicted_tokens: int
    realised_tokens: int
    limits: Limits
    use: ScopeUse | None


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the fleet; `decisions` are those since the look before, oldest first."""

    gateway: str
    at: float
    admin: str
    role: str
    num_in_flight: int
    num_waiting: int
    index_reason: str | None
    replicas: list[ReplicaState]
    tenants: list[TenantState]
    decisions: list[DecisionRecord]


class DecisionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/decisions, newest first."""

    decisions: list[DecisionRecord]


async def decisions(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/decisions: the newest of this gateway, of one `?tenant=` if named."""
    given = request.query.get("limit", str(MAX_DECISIONS))
    if not (given.isascii() and given.isdigit() and 0 < int(given) <= 1000):
        raise RequestError("invalid_request", "limit: must be 1 to 1000", param="limit")
    tenant = request.query.get("tenant")
    newest = request.app[GATEWAY].decisions.newest(int(given), tenant=tenant)
    return json_response(DecisionPage(decisions=newest))


async def live(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/live until the client goes away; with `?once=true`, one look as JSON."""
    gateway = request.app[GATEWAY]
    if request.query.get("once") == "true":
        state, _ = await look(gateway, request, 0)
        return json_response(state)
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    await response.prepare(request)
    seen = 0
    while not gateway.admission.draining:
        state, seen = await look(gateway, request, seen)
        try:
            await response.write(encode_event(state))
        except ConnectionError:
            break  # The dashboard was closed.
        await asyncio.sleep(EVERY_S)
    return response


async def look(gateway: Gateway, request: web.Request, seen: int) -> tuple[LiveState, int]:
    """Return the state of now, and the number of decisions that are known with it."""
    admin = request[ADMIN]
    newest, total = gateway.decisions.since(seen, at_most=MAX_DECISIONS)
    state = LiveState(
        gateway=gateway.id,
        at=gateway.clock.now(),
        admin=admin.name,
        role=admin.role,
        num_in_flight=gateway.admission.num_admitted,
        num_waiting=sum(map(gateway.planner.num_waiting, gateway.view.models())),
        index_reason=gateway.view.store_down_reason,
        replicas=await replica_states(gateway),
        tenants=await _tenants(gateway),
        decisions=newest,
    )
    return state, total


async def _tenants(gateway: Gateway) -> list[TenantState]:
    tenants = gateway.directory.tenants[:MAX_TENANTS]
    metrics = gateway.metrics
    scopes = [f"tenant/{tenant.name}" for tenant in tenants]
    uses: list[ScopeUse] | None
    try:
        uses = await gateway.tenancy.limiter.uses(scopes)
    except DependencyError:
        uses = None  # The state store is away; the listener's health says so.
    requests, refused = _requests(metrics.requests)
    sums = {
        name: _by_tenant(counter)
        for name, counter in (
            ("prompt_tokens", metrics.prompt_tokens),
            ("completion_tokens", metrics.completion_tokens),
            ("charged_tokens", metrics.charged_tokens),
            ("available_tokens", metrics.available),
            ("predicted_tokens", metrics.predicted),
            ("realised_tokens", metrics.realised),
        )
    }
    return [
        TenantState(
            name=tenant.name,
            requests=requests[tenant.name],
            refused=refused[tenant.name],
            limits=tenant.limits,
            use=uses[i] if uses is not None else None,
            **{name: of[tenant.name] for name, of in sums.items()},
        )
        for i, tenant in enumerate(tenants)
    ]


def _requests(counter: Counter) -> tuple[dict[str, int], dict[str, int]]:
    """Return by tenant all requests, and those answered with 429."""
    total: dict[str, int] = defaultdict(int)
    refused: dict[str, int] = defaultdict(int)
    for labels, value in _samples(counter):
        total[labels["tenant"]] += value
        if labels["status"] == "429":
            refused[labels["tenant"]] += value
    return total, refused


def _by_tenant(counter: Counter) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for labels, value in _samples(counter):
        sums[labels["tenant"]] += value
    return sums


def _samples(counter: Counter) -> list[tuple[dict[str, str], int]]:
    return [
        (sample.labels, int(sample.value))
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    ]
