"""GET /admin/index/hot: the tree of prefixes that requests share, and which replicas hold them.

It asks the index as a placement does, and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

from router.api.http import json_response
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.observe.prefix_tally import Prefix

MAX_PREFIXES = 20


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A shared prefix, named by the beginning of the hash of its last block.

    `parent` names the longest other one of the list that it begins with. `heat` is about its
    requests of the last minutes; `holders` maps the targets that hold some of it to the number of
    blocks. Of the blocks beyond the parent's, `num_held_blocks` are anywhere, and there are
    `num_duplicates` copies more than one of each.
    """

    name: str
    parent: str | None
    model: str
    tenant: str
    num_blocks: int
    num_tokens: int
    heat: float
    holders: dict[str, int]
    num_held_blocks: int = 0
    num_duplicates: int = 0


class HotPrefixList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /admin/index/hot; `reason` says why nobody knows the holders."""

    prefixes: list[HotPrefix]
    reason: str | None = None


async def hot(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/index/hot with what the requests of all processes share."""
    gateway = request.app[GATEWAY]
    hottest = gateway.prefixes.hottest(MAX_PREFIXES, now=gateway.clock.monotonic())
    names = {prefix.hashes[-1]: _name(prefix) for prefix in hottest}
    found = {names[p.hashes[-1]]: await _described(gateway, p, names) for p in hottest}
    if gateway.siblings is not None:
        for answer in (await gateway.siblings.ask("/admin/index/hot")).values():
            _merge(found, msgspec.json.decode(answer, type=HotPrefixList).prefixes)
    prefixes = sorted(found.values(), key=lambda prefix: -prefix.heat * prefix.num_tokens)
    return json_response(
        HotPrefixList(prefixes=_counted(prefixes[:MAX_PREFIXES]), reason=_reason(gateway))
    )


def _reason(gateway: Gateway) -> str | None:
    return "this gateway has no index" if gateway.index is None else gateway.view.store_down_reason


def _name(prefix: Prefix) -> str:
    return prefix.hashes[-1].hex()[:12]


async def _described(gateway: Gateway, prefix: Prefix, names: Mapping[bytes, str]) -> HotPrefix:
    holders: dict[str, int] = {}
    for pool in gateway.view.pools_of(prefix.model):
        found = await gateway.index.match(pool.id, prefix.hashes) if gateway.index else None
        holders |= {str(m.target): m.matched_blocks for m in found or () if m.matched_blocks}
    shorter = (names[block] for block in reversed(prefix.hashes[:-1]) if block in names)
    return HotPrefix(
        name=_name(prefix),
        parent=next(shorter, None),
        model=prefix.model,
        tenant=prefix.tenant,
        num_blocks=len(prefix.hashes),
        num_tokens=prefix.num_tokens,
        heat=prefix.heat,
        holders=holders,
    )


def _merge(found: dict[str, HotPrefix], others: Iterable[HotPrefix]) -> None:
    """Add what another process has counted; holders are the same for all."""
    for other in others:
        own = found.get(other.name)
        if own is not None:
            other = msgspec.structs.replace(
                own, heat=own.heat + other.heat, parent=own.parent or other.parent
            )
        found[other.name] = other


def _counted(prefixes: list[HotPrefix]) -> list[HotPrefix]:
    """Count the blocks of each that its parent has not; a parent that is not listed is none."""
    lengths = {prefix.name: prefix.num_blocks for prefix in prefixes}
    counted = []
    for prefix in prefixes:
        parent = prefix.parent if prefix.parent in lengths else None
        begin = lengths[parent] if parent is not None else 0
        beyond = [max(0, held - begin) for held in prefix.holders.values()]
        num_held = max(beyond, default=0)
        counted.append(
            msgspec.structs.replace(
                prefix,
                parent=parent,
                num_held_blocks=num_held,
                num_duplicates=sum(beyond) - num_held,
            )
        )
    return counted
