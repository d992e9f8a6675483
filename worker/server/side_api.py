"""A replica's other endpoints: models, health, metrics, cache control, tokenizer.

They read or nudge the engine; none of them generates.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.errors import invalid_value as _invalid
from engine.frontend.openai import ModelCard, ModelList
from engine.frontend.tokenize import (
    DetokenizeAnswer,
    TokenizeAnswer,
    detokenize,
    parse_detokenize_request,
    parse_tokenize_request,
    tokenize,
)
from engine.messages import EngineStats, TenantStats
from kvindex.foundation.errors import DependencyError
from worker.core.client import EngineClient
from worker.server.front import ReplicaFront
from worker.server.generate_api import FRONT
from worker.server.http import json_response, read_json_body
from worker.server.metrics import CONTENT_TYPE

_log = logging.getLogger("prefixfleet.replica.side")
MSGPACK = "application/msgpack"
_TENANT_STATS_TIMEOUT_S = 1.0
_DRAIN_POLL_S = 0.05


async def models(request: web.Request) -> web.Response:
    """List the names under which this replica serves its model, and its adapters."""
    front = request.app[FRONT]
    max_model_len = front.client.info.max_model_len
    cards = [
        ModelCard(id=name, created=front.created_at, max_model_len=max_model_len)
        for name in front.spec.served_models
    ]
    cards += [
        ModelCard(
            id=adapter.name,
            created=front.created_at,
            max_model_len=max_model_len,
            root=adapter.path,
            parent=front.spec.served_models[0],
        )
        for adapter in front.adapters
    ]
    return json_response(ModelList(data=cards))


async def model_info(request: web.Request) -> web.Response:
    """Say which model is served, as routers of the SGLang family ask before they send anything."""
    return json_response({"model_path": request.app[FRONT].spec.served_models[0]})


async def health(request: web.Request) -> web.Response:
    """Answer 200 when traffic may come, 503 with the reason otherwise.

    `degraded` is for a replica that serves although one of its engine cores does not.
    """
    front = request.app[FRONT]
    trouble = front.trouble()
    degradation = front.degradation() if trouble is None else None
    status = front.status if trouble is None else _bad_status(front)
    body = {
        "status": status if degradation is None else "degraded",
        "reason": trouble or degradation,
        "mode": front.index_mode,
    }
    return json_response(body, status=200 if trouble is None else 503)


def _bad_status(front: ReplicaFront) -> str:
    if front.status != "ready":
        return front.status
    return "sleeping" if front.trouble() == front.rest_reason else "unresponsive"


async def metrics(request: web.Request) -> web.Response:
    """Answer a Prometheus scrape; the label `engine` is the data-parallel rank."""
    front = request.app[FRONT]
    stats = [core.stats for core in front.client.ranks] if front.has_engine else []
    tenants = await _tenant_stats(front) if front.has_engine else {}
    text = front.metrics.render(
        stats,
        tenants,
        mode=front.index_mode,
        num_active=front.num_active,
        ingest={rank: ingester.counters for rank, ingester in front.ingesters.items()},
    )
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


async def _tenant_stats(front: ReplicaFront) -> dict[str, TenantStats]:
    """Ask the cores; a scrape goes without tenants when a core is too busy to answer, or dead."""
    try:
        async with asyncio.timeout(_TENANT_STATS_TIMEOUT_S):
            return await front.client.tenant_stats()
    except (TimeoutError, RequestError) as error:
        _log.warning("metrics without tenants error=%r", str(error))
        return {}


async def pause(request: web.Request) -> web.Response:
    """Stop admitting requests; `?mode=keep` freezes running ones, `wait` lets them end first.

    With `wait`, the default, the answer comes when nothing runs any more. Requests that come
    meanwhile wait; nothing is lost.
    """
    mode = request.query.get("mode", "wait")
    if mode not in ("keep", "wait"):
        raise _invalid("mode", f"must be keep or wait, got {mode!r}")
    client = request.app[FRONT].client
    await client.pause("all" if mode == "keep" else "new")
    if mode == "wait":
        await _drained(client)
    return json_response({"paused": True})


async def _drained(client: EngineClient) -> None:
    """Wait until nothing runs any more in any core, or somebody has resumed it."""
    for core in client.ranks:
        while _is_draining(core.stats):  # noqa: ASYNC110  (statistics are a plain attribute)
            await asyncio.sleep(_DRAIN_POLL_S)


def _is_draining(stats: EngineStats) -> bool:
    return stats.pause_mode is not None and stats.num_running + stats.num_preempted > 0


async def resume(request: web.Request) -> web.Response:
    """Go on after a pause."""
    await request.app[FRONT].client.resume()
    return json_response({"paused": False})


async def is_paused(request: web.Request) -> web.Response:
    """Tell whether any engine core is paused."""
    ranks = request.app[FRONT].client.ranks
    return json_response({"is_paused": any(core.stats.pause_mode is not None for core in ranks)})


async def kv_snapshot(request: web.Request) -> web.Response:
    """Return every cached block of one core as of a step border, as msgpack.

    `?format=json` gives JSON; `?rank=1` is the second core of several, the first by default.
    """
    layout = request.query.get("format", "msgpack")
    if layout not in ("msgpack", "json"):
        raise _invalid("format", f"must be msgpack or json, got {layout!r}")
    (snapshot,) = await _ranked(request).snapshots()
    if layout == "json":
        return json_response(snapshot)
    return web.Response(body=msgspec.msgpack.encode(snapshot), content_type=MSGPACK)


def _ranked(request: web.Request) -> EngineClient:
    """Return the core that a request names by its rank."""
    ranks = request.app[FRONT].client.ranks
    given = request.query.get("rank", "0")
    if not (given.isascii() and given.isdigit() and int(given) < len(ranks)):
        raise _invalid("rank", f"must be below {len(ranks)}, got {given!r}")
    return ranks[int(given)]


async def kv_rebuild(request: web.Request) -> web.Response:
    """Load a snapshot of every core into the fleet's index anew; answers when that is done."""
    ingesters = request.app[FRONT].ingesters
    if not ingesters:
        raise RequestError("not_found", "this replica is in no fleet: it has no index to rebuild")
    try:
        sizes = await asyncio.gather(*(ingester.rebuild() for ingester in ingesters.values()))
    except DependencyError as error:
        raise RequestError("no_replica", f"not rebuilt: {error}", retry_after_s=1.0) from None
    ranks = [
        {"dp_rank": rank, "num_blocks": size, "epoch": ingester.epoch}
        for (rank, ingester), size in zip(ingesters.items(), sizes, strict=True)
    ]
    return json_response({"num_blocks": sum(sizes), "epoch": ranks[0]["epoch"], "ranks": ranks})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached blocks; success is false, and nothing changed, while requests hold some.

    `?reset_running_requests=true` preempts them instead: they go on and lose no token.
    """
    flag = request.query.get("reset_running_requests", "false").lower()
    if flag not in ("true", "false", "1", "0"):
        raise _invalid("reset_running_requests", f"must be true or false, got {flag!r}")
    client = request.app[FRONT].client
    done = await client.reset_prefix_cache(preempt_running=flag in ("true", "1"))
    return json_response({"success": done})


async def kv_resize(request: web.Request) -> web.Response:
    """Give the KV cache of every core `?num_blocks=N` blocks; answers with what they then have."""
    given = request.query.get("num_blocks", "")
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise _invalid("num_blocks", f"must be a positive number, got {given!r}")
    ranks = request.app[FRONT].client.ranks
    sizes = await asyncio.gather(*(core.resize(int(given)) for core in ranks))
    return json_response({"num_blocks": sizes})


async def tokenizer(request: web.Request) -> web.Response:
    """Hand out the files by which a gateway tokenizes as we do."""
    bundle = request.app[FRONT].bundle
    headers = {"ETag": f'"{bundle.digest}"'}
    return web.Response(body=msgspec.msgpack.encode(bundle), content_type=MSGPACK, headers=headers)


async def tokenize_text(request: web.Request) -> web.Response:
    """Turn a text, or a conversation as the model sees it, into token ids."""
    front = request.app[FRONT]
    body = await read_json_body(request)

    def answer() -> TokenizeAnswer:
        given = parse_tokenize_request(body)
        _check_model(front, given.model)
        return tokenize(given, front.prompts, max_model_len=front.client.info.max_model_len)

    return json_response(await front.pool.run(answer))


async def detokenize_ids(request: web.Request) -> web.Response:
    """Turn token ids into text, special tokens included."""
    front = request.app[FRONT]
    body = await read_json_body(request)

    def answer() -> DetokenizeAnswer:
        given = parse_detokenize_request(body)
        _check_model(front, given.model)
        return detokenize(given, front.prompts)

    return json_response(await front.pool.run(answer))


def _check_model(front: ReplicaFront, model: str | None) -> None:
    if model is not None:
        front.require_model(model)
