"""`/health` and `/ready`: is this process alive, and should it get traffic.

Both need no key and tell nothing about tenants.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from kvindex.index import TrustMode
from router.api.http import json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.tenancy.fleet_limiter import FleetLimiter


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a store answers; `configured` is False for a gateway without it."""

    configured: bool
    reachable: bool
    reason: str | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a gateway; `mode` is the worst of its live replicas.

    Without the shared `index`, requests are placed from what is known; without the `state` store,
    limits are enforced by share.
    """

    status: Literal["ok", "draining"]
    mode: TrustMode
    index: StoreHealth
    state: StoreHealth
    num_replicas: int
    num_live_replicas: int


def health_of(gateway: Gateway) -> Health:
    """Describe a gateway."""
    replicas = gateway.view.replicas
    return Health(
        status="draining" if gateway.admission.draining else "ok",
        mode=gateway.view.mode,
        index=_store_health(
            configured=gateway.index is not None, reason=gateway.view.store_down_reason
        ),
        state=_state_of(gateway),
        num_replicas=len(replicas),
        num_live_replicas=sum(replica.live for replica in replicas),
    )


def _state_of(gateway: Gateway) -> StoreHealth:
    limiter = gateway.tenancy.limiter
    if not isinstance(limiter, FleetLimiter):
        return _store_health(configured=False, reason=None)
    return _store_health(configured=True, reason=limiter.down_reason)


def _store_health(*, configured: bool, reason: str | None) -> StoreHealth:
    return StoreHealth(
        configured=configured, reachable=configured and reason is None, reason=reason
    )


async def health(request: web.Request) -> web.StreamResponse:
    """Answer 200 as long as the process can answer at all, with its mode in the body."""
    return json_response(health_of(request.app[GATEWAY]))


async def ready(request: web.Request) -> web.StreamResponse:
    """Answer 200 when requests can be served, 503 while draining or without a replica."""
    state = health_of(request.app[GATEWAY])
    can_serve = state.status == "ok" and state.num_replicas > 0
    return json_response(state, status=200 if can_serve else 503)
