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


class IndexHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the shared index answers; `configured` is False for a gateway without one."""

    configured: bool
    reachable: bool
    reason: str | None = None


class StateHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the state store answers; while it does not, limits are enforced by share."""

    configured: bool
    reachable: bool
    reason: str | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a gateway; `mode` is the worst of its live replicas."""

    status: Literal["ok", "draining"]
    mode: TrustMode
    index: IndexHealth
    state: StateHealth
    num_replicas: int
    num_live_replicas: int


def health_of(gateway: Gateway) -> Health:
    """Describe a gateway."""
    replicas = gateway.view.replicas
    configured, reason = gateway.index is not None, gateway.view.store_down_reason
    return Health(
        status="draining" if gateway.admission.draining else "ok",
        mode=gateway.view.mode,
        index=IndexHealth(
            configured=configured, reachable=configured and reason is None, reason=reason
        ),
        state=_state_of(gateway),
        num_replicas=len(replicas),
        num_live_replicas=sum(replica.live for replica in replicas),
    )


def _state_of(gateway: Gateway) -> StateHealth:
    limiter = gateway.tenancy.limiter
    if not isinstance(limiter, FleetLimiter):
        return StateHealth(configured=False, reachable=False)
    reason = limiter.down_reason
    return StateHealth(configured=True, reachable=reason is None, reason=reason)


async def health(request: web.Request) -> web.StreamResponse:
    """Answer 200 as long as the process can answer at all, with its mode in the body."""
    return json_response(health_of(request.app[GATEWAY]))


async def ready(request: web.Request) -> web.StreamResponse:
    """Answer 200 when requests can be served, 503 while draining or without a replica."""
    state = health_of(request.app[GATEWAY])
    can_serve = state.status == "ok" and state.num_replicas > 0
    return json_response(state, status=200 if can_serve else 503)
