"""`/tokenize` and `/detokenize` at the gateway: what a replica of the model would answer.

The key must be allowed the model; nothing is limited or charged, as nothing is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    parse_detokenize_request,
    parse_tokenize_request,
    tokenize,
)
from router.api.http import json_response, read_json
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.request.auth import bearer_key
from router.tenancy.tenancy import unknown_model
from router.tenancy.tenants import Identity

GivenT = TypeVar("GivenT", TokenizeRequest, DetokenizeRequest)


async def tokenize_text(request: web.Request) -> web.StreamResponse:
    """Answer POST /tokenize."""
    return await _answer(
        request,
        parse_tokenize_request,
        lambda given, prompts, length: tokenize(given, prompts, max_model_len=length),
    )


async def detokenize_ids(request: web.Request) -> web.StreamResponse:
    """Answer POST /detokenize."""
    return await _answer(
        request, parse_detokenize_request, lambda given, prompts, _: detokenize(given, prompts)
    )


async def _answer(
    request: web.Request,
    parse: Callable[[bytes], GivenT],
    work: Callable[[GivenT, PromptEncoder, int | None], msgspec.Struct],
) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    identity = await gateway.tenancy.identify_now(bearer_key(request.headers))
    with gateway.admission.admit():
        body = await read_json(request, timeout_s=gateway.config.body_timeout_s)
        given = await gateway.preparer.run(lambda: parse(body))
        tokenizing = await gateway.tokenizer(_model(gateway, identity, given.model))
        if tokenizing is None or tokenizing.encoder is None:
            raise RequestError(
                "no_replica", "no replica has handed over its tokenizer yet", retry_after_s=1.0
            )
        prompts, length = tokenizing.encoder, tokenizing.max_model_len
        return json_response(await gateway.preparer.run(lambda: work(given, prompts, length)))


def _model(gateway: Gateway, identity: Identity, asked: str | None) -> str:
    """Return the served model that is meant; the only usable one need not be named."""
    usable = identity.usable(gateway.view.models())
    if asked is None and len(set(usable.values())) != 1:
        names = ", ".join(usable) or "none"
        raise RequestError("invalid_request", f"model: name one of {names}", param="model")
    if asked is None:
        return next(iter(usable.values()))
    if asked not in usable:
        raise unknown_model(asked)
    return usable[asked]
