"""The admin listener: replicas, decisions, metrics.

It shows and resets; tenants and configuration are changed elsewhere, and who may call is decided in
access.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from kvindex.index import LoadReport, TrustMode
from kvindex.registry import ReplicaKind
from router.api.counts import by_label
from router.api.http import json_bytes, json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.fleet.client import ReplicaFailure
from router.fleet.pools import Refusal
from router.fleet.replica import Replica
from router.observe.scrape import merge_scrapes
from router.policy.types import BreakerState
from router.tenancy.fleet_limiter import FleetLimiter

_RESET_TIMEOUT_S = 30.0


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as this gateway sees it; `reason` says why it is not live or not EXACT.

    `num_blocks` are those that its engines have cached, by tier; `max_blocks` what they can hold.
    `num_active`, and the prompt tokens that it has served and found cached, are of all processes of
    this gateway, since their start.
    """

    id: str
    kind: ReplicaKind
    url: str
    live: bool
    mode: TrustMode
    reason: str
    breaker: BreakerState
    served_models: tuple[str, ...]
    max_model_len: int | None
    pool: str | None
    epoch: int | None
    num_restarts: int
    num_active: int
    prompt_tokens: int
    cached_tokens: int
    num_blocks: dict[str, int] | None
    max_blocks: int | None
    report: LoadReport


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/replicas."""

    gateway: str
    replicas: list[ReplicaState]
    refused: list[Refusal]


async def replicas(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/replicas."""
    gateway = request.app[GATEWAY]
    states = await replica_states(gateway)
    return json_response(
        ReplicaList(gateway=gateway.id, replicas=states, refused=gateway.view.refusals)
    )


async def replica_states(gateway: Gateway) -> list[ReplicaState]:
    """Describe every replica, with the requests of all processes of this gateway."""
    prompts = by_label(gateway.metrics.replica_prompt_tokens, "replica")
    cached = by_label(gateway.metrics.replica_cached_tokens, "replica")
    states = [
        _state(
            gateway, replica, prompt_tokens=prompts[replica.id], cached_tokens=cached[replica.id]
        )
        for replica in gateway.view.replicas
    ]
    if gateway.siblings is not None:
        states = _added(states, await gateway.siblings.ask("/admin/replicas"))
    return states


async def reset_prefix_cache(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/replicas/{id}/reset_prefix_cache with what the replica answered."""
    gateway = request.app[GATEWAY]
    replica_id = request.match_info["id"]
    replica = next((r for r in gateway.view.replicas if r.id == replica_id), None)
    if replica is None:
        known = ", ".join(r.id for r in gateway.view.replicas) or "none"
        raise RequestError("not_found", f"no replica {replica_id!r}; there are: {known}")
    url = f"{replica.url}/reset_prefix_cache"
    if request.query_string:
        url = f"{url}?{request.query_string}"
    try:
        body = await gateway.client.post_small(
            url, headers=replica.headers, timeout_s=_RESET_TIMEOUT_S
        )
    except ReplicaFailure as failure:
        raise RequestError("replica_lost", f"replica {replica_id}: {failure}") from None
    gateway.history.forget(replica_id)
    return json_bytes(body)


async def decision(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/decisions/{id}."""
    gateway = request.app[GATEWAY]
    request_id = request.match_info["id"]
    record = await gateway.decisions.find(request_id)
    if record is None:
        raise RequestError(
            "not_found",
            f"no decision {request_id!r}; the last {gateway.config.max_decisions} finished "
            "requests are kept",
        )
    return json_response(record)


async def metrics(request: web.Request) -> web.StreamResponse:
    """Answer GET /metrics in Prometheus' text format."""
    gateway = request.app[GATEWAY]
    _fill_gauges(gateway)
    body = await asyncio.to_thread(gateway.metrics.render)
    if gateway.siblings is not None:
        others = await gateway.siblings.ask("/metrics")
        body = await asyncio.to_thread(merge_scrapes, {0: body, **others})
    return web.Response(
        body=body,
        headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
    )


def _added(states: list[ReplicaState], others: Mapping[int, bytes]) -> list[ReplicaState]:
    """Add what the other processes have at each replica, and have had from it."""
    known = {state.id: state for state in states}
    for answer in others.values():
        for other in msgspec.json.decode(answer, type=ReplicaList).replicas:
            own = known.get(other.id)
            if own is not None:
                known[other.id] = msgspec.structs.replace(
                    own,
                    num_active=own.num_active + other.num_active,
                    prompt_tokens=own.prompt_tokens + other.prompt_tokens,
                    cached_tokens=own.cached_tokens + other.cached_tokens,
                )
    return list(known.values())


def _state(
    gateway: Gateway, replica: Replica, *, prompt_tokens: int, cached_tokens: int
) -> ReplicaState:
    return ReplicaState(
        id=replica.id,
        kind=replica.kind,
        url=replica.url,
        live=replica.live,
        mode=gateway.view.mode_of(replica),
        reason=gateway.reason_for(replica),
        breaker=gateway.planner.breaker_state(replica.id, gateway.clock.monotonic()),
        served_models=replica.served_models,
        max_model_len=replica.max_model_len,
        pool=replica.pool.id if replica.pool is not None else None,
        epoch=replica.record.epoch if replica.record is not None else None,
        num_restarts=replica.num_restarts,
        num_active=_num_active(gateway, replica),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        num_blocks=replica.num_blocks,
        max_blocks=_max_blocks(replica),
        report=replica.report,
    )


def _max_blocks(replica: Replica) -> int | None:
    """Return the blocks of all engine cores together, None where they are not known."""
    record = replica.record
    return record.num_blocks * record.dp_size or None if record is not None else None


def _num_active(gateway: Gateway, replica: Replica) -> int:
    ledger = gateway.planner.ledger
    return sum(ledger.account(target).num_active for target in replica.targets)


def _fill_gauges(gateway: Gateway) -> None:
    metrics, now = gateway.metrics, gateway.clock.monotonic()
    limiter = gateway.tenancy.limiter
    if isinstance(limiter, FleetLimiter):
        metrics.limits_shared.set(1 if limiter.down_reason is None else 0)
        metrics.unsettled.set(limiter.num_undelivered)
    metrics.directory_restored.set(gateway.tenancy.live.num_restored)
    metrics.in_flight.set(gateway.admission.num_admitted)
    metrics.index_up.set(1 if gateway.view.index_is_up else 0)
    metrics.keep_replicas([replica.id for replica in gateway.view.replicas])
    for replica in gateway.view.replicas:
        metrics.set_replica(
            replica.id,
            mode=gateway.view.mode_of(replica) if replica.live else None,
            num_active=_num_active(gateway, replica),
            breaker=gateway.planner.breaker_state(replica.id, now),
        )
