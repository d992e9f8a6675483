"""The policies that there are, and `POST …/policy/dry-run`: another one on what was recorded.

It changes nothing. What is replayed and how the two replays compare is router/tenancy/dry_run.py.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from kvindex.foundation.errors import ConfigError
from router.api.http import decode_as, json_response, read_json
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.observe.recording import NothingRecordedError, collect
from router.policy.registry import POLICIES, build_policy
from router.tenancy.dry_run import MAX_ROWS, DryRunFailedError, SimulatedFleet

_BLOCKS = 4096
"""What a replica is taken to hold when it does not say."""


class WantedPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy to try."""

    policy: str
    params: dict[str, float] = {}


class KnownPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy and the defaults of its parameters."""

    name: str
    params: dict[str, float]


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/policies; `default` places the tenants that name none."""

    policies: list[KnownPolicy]
    default: str
    default_params: Mapping[str, float]


async def policies(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/policies."""
    name, params = request.app[GATEWAY].default_policy
    known = [
        KnownPolicy(name=name, params={f.name: f.default for f in msgspec.structs.fields(policy)})
        for name, policy in sorted(POLICIES.items())
    ]
    return json_response(PolicyList(policies=known, default=name, default_params=params))


async def dry_run(request: web.Request) -> web.StreamResponse:
    """Answer with both replays; 404 without the tenant, 422 where nothing can be replayed."""
    gateway, tenant = request.app[GATEWAY], request.match_info["tenant"]
    body = await read_json(request, timeout_s=gateway.config.body_timeout_s)
    wanted = decode_as(body, WantedPolicy)
    tenants = gateway.directory.tenants
    if all(one.name != tenant for one in tenants):
        raise RequestError("not_found", f"no tenant {tenant!r}")
    try:
        build_policy(wanted.policy, wanted.params, owner="policy")
        with tempfile.TemporaryDirectory(prefix="prefixfleet-dry-run-") as folder:
            trace = Path(folder) / "trace.jsonl"
            num_rows = await asyncio.to_thread(
                collect, _recordings(gateway), trace, max_rows=MAX_ROWS
            )
            found = await gateway.dry_run.compare(
                trace,
                num_rows,
                tenant=tenant,
                choice=(wanted.policy, wanted.params),
                tenants=tenants,
                default=gateway.default_policy,
                fleet=_fleet(gateway),
            )
    except (ConfigError, NothingRecordedError, DryRunFailedError) as error:
        raise RequestError("unprocessable", str(error)) from None
    return json_response(found)


def _recordings(gateway: Gateway) -> list[Path]:
    """Return the files of this gateway's recording, also those of its other processes."""
    if gateway.recorder is None:
        raise NothingRecordedError("this gateway records nothing; set router.record")
    path = gateway.recorder.path
    if gateway.seat is None or gateway.seat.is_alone:
        return [path]
    return [
        path.with_name(path.name.replace(f".p{gateway.seat.number}", f".p{number}"))
        for number in range(gateway.seat.num_processes)
    ]


def _fleet(gateway: Gateway) -> SimulatedFleet:
    """Describe the live fleet as the simulator can: equal replicas, the smallest of them."""
    targets = [target for r in gateway.view.replicas if r.live for target in r.targets]
    sizes = [r.record.num_blocks for r in gateway.view.replicas if r.live and r.record is not None]
    return SimulatedFleet(
        replicas=max(1, len(targets)), blocks=min((n for n in sizes if n), default=_BLOCKS)
    )
