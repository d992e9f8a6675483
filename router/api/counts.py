"""`/admin/counts`: what one process of a gateway has counted by tenant, and the sum over all.

It reads the metrics and the queues; limits, and what is left of them, are not its business.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence

import msgspec
from aiohttp import web
from prometheus_client import Counter

from router.api.http import json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.observe.metrics import GatewayMetrics


class TenantCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's requests and tokens since the start, and its requests that wait for a place.

    Hit tokens: `available` where most of a prompt was held, `predicted` where it was sent,
    `realised` by the replica.
    """

    requests: int = 0
    refused: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    charged_tokens: int = 0
    available_tokens: int = 0
    predicted_tokens: int = 0
    realised_tokens: int = 0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/counts: requests inside, those of them that wait, tenants by name."""

    num_in_flight: int
    num_waiting: int
    tenants: dict[str, TenantCounts]


async def counts(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/counts."""
    return json_response(await counts_of_all(request.app[GATEWAY]))


async def counts_of_all(gateway: Gateway) -> Counts:
    """Count over all processes of a gateway; one that does not answer is left out."""
    total = await _own(gateway)
    if gateway.siblings is not None:
        for answer in (await gateway.siblings.ask("/admin/counts")).values():
            total = _sum(total, msgspec.json.decode(answer, type=Counts))
    return total


def by_label(counter: Counter, label: str) -> defaultdict[str, int]:
    """Sum a counter up by one of its labels."""
    sums: defaultdict[str, int] = defaultdict(int)
    for labels, value in _samples(counter):
        sums[labels[label]] += value
    return sums


async def _own(gateway: Gateway) -> Counts:
    # In a thread: with many tenants it takes long enough for streams to notice.
    sums = await asyncio.to_thread(_sums, gateway.metrics)
    for tenant in gateway.directory.tenants:
        sums[tenant.name]["num_waiting"] = gateway.planner.num_waiting_of(tenant.name)
    return Counts(
        num_in_flight=gateway.admission.num_admitted,
        num_waiting=sum(map(gateway.planner.num_waiting, gateway.view.models())),
        tenants={name: TenantCounts(**of_tenant) for name, of_tenant in sums.items()},
    )


def _sums(metrics: GatewayMetrics) -> defaultdict[str, Tally[str]]:
    """Sum the counters up by tenant; O(series)."""
    sums: defaultdict[str, Tally[str]] = defaultdict(Tally)
    for labels, value in _samples(metrics.requests):
        sums[labels["tenant"]]["requests"] += value
        if labels["status"] == "429":
            sums[labels["tenant"]]["refused"] += value
    for field, counter in (
        ("prompt_tokens", metrics.prompt_tokens),
        ("completion_tokens", metrics.completion_tokens),
        ("charged_tokens", metrics.charged_tokens),
        ("available_tokens", metrics.available),
        ("predicted_tokens", metrics.predicted),
        ("realised_tokens", metrics.realised),
    ):
        for name, value in by_label(counter, "tenant").items():
            sums[name][field] = value
    return sums


def _sum(one: Counts, other: Counts) -> Counts:
    tenants = dict(one.tenants)
    for name, counted in other.tenants.items():
        known = msgspec.structs.asdict(tenants.get(name, TenantCounts()))
        tenants[name] = TenantCounts(
            **{
                field: known[field] + value
                for field, value in msgspec.structs.asdict(counted).items()
            }
        )
    return Counts(
        num_in_flight=one.num_in_flight + other.num_in_flight,
        num_waiting=one.num_waiting + other.num_waiting,
        tenants=tenants,
    )


def _samples(counter: Counter) -> Sequence[tuple[dict[str, str], int]]:
    return [
        (sample.labels, int(sample.value))
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    ]
