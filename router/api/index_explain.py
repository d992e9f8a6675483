"""POST /admin/index/explain: how much of a prompt each replica holds, and where it first diverges.

The prompt takes the path of a real request (template aside): tokenizer, salt of the tenant, hash
chain, match. Nothing is reserved and nothing is sent to a replica.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from kvindex.index import TargetMatch, TrustMode
from router.api.http import decode_as, json_response, read_json
from router.api.openai import GATEWAY
from router.assembly import Gateway, Tokenizing
from router.config import TenantConfig
from router.request.prepare import Prepared
from router.tenancy.salt import cache_salt


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt as text or as token ids; `tenant` and `model` where there are several."""

    prompt: str | list[int]
    tenant: str | None = None
    model: str | None = None
    cache_salt: str | None = None


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one target holds; the divergence is null where it holds every full block."""

    target: str
    mode: TrustMode
    matched_blocks: int
    matched_tokens: int
    pending_blocks: int
    diverges_at_token: int | None
    diverges_with: str | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to POST /admin/index/explain."""

    tenant: str
    model: str
    num_tokens: int
    block_size: int
    num_blocks: int
    targets: list[Holding]


async def explain(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/index/explain."""
    gateway = request.app[GATEWAY]
    body = await read_json(request, timeout_s=gateway.config.body_timeout_s)
    wanted = decode_as(body, ExplainRequest)
    tenant = _tenant(gateway, wanted.tenant)
    model = _model(gateway, wanted.model)
    tokenizing = await gateway.tokenizer(model)
    if tokenizing is None or tokenizing.encoder is None:
        raise RequestError("no_replica", f"no replica has given the tokenizer of {model!r} yet")
    salt = cache_salt(gateway.fleet_secret, tenant.isolation_group, wanted.cache_salt)
    prepared = await gateway.preparer.prepare(
        msgspec.json.encode({"model": model, "prompt": wanted.prompt, "max_tokens": 1}),
        "completions",
        encoder=tokenizing.encoder,
        max_model_len=tokenizing.max_model_len,
        scheme=tokenizing.scheme,
        cache_salt=salt,
    )
    matches = await _match(gateway, model, prepared)
    return json_response(
        Explanation(
            tenant=tenant.name,
            model=model,
            num_tokens=prepared.num_prompt_tokens,
            block_size=tokenizing.scheme.block_size,
            num_blocks=len(prepared.hashes),
            targets=[_holding(match, prepared, tokenizing) for match in matches],
        )
    )


async def _match(gateway: Gateway, model: str, prepared: Prepared) -> list[TargetMatch]:
    matches: list[TargetMatch] = []
    for pool in gateway.view.pools_of(model):
        found = await gateway.index.match(pool.id, prepared.hashes) if gateway.index else None
        if found is None:
            reason = gateway.view.store_down_reason or "this gateway has none"
            raise RequestError("no_replica", f"the index cannot be asked: {reason}")
        matches += found
    return matches


def _holding(match: TargetMatch, prepared: Prepared, tokenizing: Tokenizing) -> Holding:
    block_size, matched = tokenizing.scheme.block_size, match.matched_blocks
    diverges_at = matched * block_size if matched < len(prepared.hashes) else None
    text = None
    if diverges_at is not None and tokenizing.encoder is not None:
        block = prepared.prompts[0][diverges_at : diverges_at + block_size]
        text = tokenizing.encoder.encoder.decode(block, skip_special_tokens=False)
    return Holding(
        target=str(match.target),
        mode=match.report.mode,
        matched_blocks=matched,
        matched_tokens=matched * block_size,
        pending_blocks=match.pending_blocks,
        diverges_at_token=diverges_at,
        diverges_with=text,
    )


def _tenant(gateway: Gateway, name: str | None) -> TenantConfig:
    tenants = {tenant.name: tenant for tenant in gateway.directory.tenants}
    if name is None and len(tenants) == 1:
        return next(iter(tenants.values()))
    if name is None or name not in tenants:
        raise RequestError(
            "invalid_request",
            f"tenant: name one of {', '.join(sorted(tenants))}",
            param="tenant",
        )
    return tenants[name]


def _model(gateway: Gateway, name: str | None) -> str:
    models = sorted(gateway.view.models())
    if not models:
        raise RequestError("no_replica", "no replica has registered yet", retry_after_s=1.0)
    if name is None and len(models) == 1:
        return models[0]
    if name is None or name not in models:
        raise RequestError(
            "model_not_found", f"model: name one of {', '.join(models)}", param="model"
        )
    return name
