"""GET /admin/index/hot: the prefixes that requests share, and which replicas hold them.

It asks the index as a placement does, and reserves nothing.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from router.api.http import json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.observe.prefix_tally import Prefix

MAX_PREFIXES = 20


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A shared prefix, named by the beginning of the hash of its last block.

    `heat` is about its requests of the last minutes; `holders` maps the targets that hold some of
    it to the number of blocks.
    """

    name: str
    model: str
    tenant: str
    num_blocks: int
    num_tokens: int
    heat: float
    holders: dict[str, int]


class HotPrefixList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/index/hot; `reason` says why nobody knows the holders."""

    prefixes: list[HotPrefix]
    reason: str | None = None


async def hot(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/index/hot."""
    gateway = request.app[GATEWAY]
    hottest = gateway.prefixes.hottest(MAX_PREFIXES, now=gateway.clock.monotonic())
    return json_response(
        HotPrefixList(
            prefixes=[await _described(gateway, prefix) for prefix in hottest],
            reason=None if gateway.index is not None else "this gateway has no index",
        )
    )


async def _described(gateway: Gateway, prefix: Prefix) -> HotPrefix:
    holders: dict[str, int] = {}
    for pool in gateway.view.pools_of(prefix.model):
        found = await gateway.index.match(pool.id, prefix.hashes) if gateway.index else None
        holders |= {str(m.target): m.matched_blocks for m in found or () if m.matched_blocks}
    return HotPrefix(
        name=prefix.hashes[-1].hex()[:12],
        model=prefix.model,
        tenant=prefix.tenant,
        num_blocks=len(prefix.hashes),
        num_tokens=prefix.num_tokens,
        heat=prefix.heat,
        holders=holders,
    )
