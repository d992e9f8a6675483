"""A replica's other endpoints: models, health, metrics, cache control, tokenizer.

They read or nudge the engine; none of them generates.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from engine.frontend.openai import ChatMessage, ModelCard, ModelList
from engine.frontend.params import check_token_ids
from engine.frontend.parse import invalid_field, parse_object
from kvindex.foundation.errors import DependencyError
from worker.server.front import ReplicaFront
from worker.server.generate_api import FRONT
from worker.server.http import json_response, read_json_body
from worker.server.metrics import CONTENT_TYPE

MSGPACK = "application/msgpack"
StructT = TypeVar("StructT", bound=msgspec.Struct)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """Text of token ids."""

    prompt: str


async def models(request: web.Request) -> web.Response:
    """List the names under which this replica serves its model."""
    front = request.app[FRONT]
    max_model_len = front.client.info.max_model_len
    cards = [
        ModelCard(id=name, created=front.created_at, max_model_len=max_model_len)
        for name in front.spec.served_models
    ]
    return json_response(ModelList(data=cards))


async def health(request: web.Request) -> web.Response:
    """Answer 200 when traffic may come, 503 with the reason otherwise."""
    front = request.app[FRONT]
    trouble = front.trouble()
    body = {
        "status": front.status if trouble is None else _bad_status(front),
        "reason": trouble,
        "mode": front.index_mode,
    }
    return json_response(body, status=200 if trouble is None else 503)


def _bad_status(front: ReplicaFront) -> str:
    return "unresponsive" if front.status == "ready" else front.status


async def metrics(request: web.Request) -> web.Response:
    """Answer a Prometheus scrape."""
    front = request.app[FRONT]
    stats = front.client.stats if front.has_engine else None
    text = front.metrics.render(stats, mode=front.index_mode, num_active=front.num_active)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


async def kv_snapshot(request: web.Request) -> web.Response:
    """Return every cached block as of a step border, as msgpack or (`?format=json`) as JSON."""
    snapshot = await request.app[FRONT].client.snapshot()
    layout = request.query.get("format", "msgpack")
    if layout == "json":
        return json_response(snapshot)
    if layout != "msgpack":
        raise _invalid("format", f"must be msgpack or json, got {layout!r}")
    return web.Response(body=msgspec.msgpack.encode(snapshot), content_type=MSGPACK)


async def kv_rebuild(request: web.Request) -> web.Response:
    """Load a snapshot into the fleet's index anew; answers when that is done, with its size."""
    ingester = request.app[FRONT].ingester
    if ingester is None:
        raise RequestError("not_found", "this replica is in no fleet: it has no index to rebuild")
    try:
        num_blocks = await ingester.rebuild()
    except DependencyError as error:
        raise RequestError("no_replica", f"not rebuilt: {error}", retry_after_s=1.0) from None
    return json_response({"num_blocks": num_blocks, "epoch": ingester.epoch})


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


async def tokenizer(request: web.Request) -> web.Response:
    """Hand out the files by which a gateway tokenizes as we do."""
    bundle = request.app[FRONT].bundle
    headers = {"ETag": f'"{bundle.digest}"'}
    return web.Response(body=msgspec.msgpack.encode(bundle), content_type=MSGPACK, headers=headers)


async def tokenize(request: web.Request) -> web.Response:
    """Turn a text, or a conversation as the model sees it, into token ids."""
    front = request.app[FRONT]
    body = await read_json_body(request)
    return json_response(await front.pool.run(lambda: _tokenize(front, body)))


def _tokenize(front: ReplicaFront, body: bytes) -> TokenizeAnswer:
    given = _parse(body, TokenizeRequest)
    _check_model(front, given.model)
    if (given.prompt is None) == (given.messages is None):
        raise _invalid("prompt", "send either prompt or messages")
    encoder, text = front.prompts.encoder, given.prompt
    special = given.add_special_tokens
    if given.messages is not None:
        text = front.prompts.render(
            given.messages, add_generation_prompt=given.add_generation_prompt
        )
    assert text is not None
    tokens = encoder.encode(
        text, add_special_tokens=given.messages is None if special is None else special
    )
    names = [encoder.token_text(token) for token in tokens] if given.return_token_strs else None
    max_model_len = front.client.info.max_model_len
    return TokenizeAnswer(
        count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=names
    )


async def detokenize(request: web.Request) -> web.Response:
    """Turn token ids into text, special tokens included."""
    front = request.app[FRONT]
    body = await read_json_body(request)
    return json_response(await front.pool.run(lambda: _detokenize(front, body)))


def _detokenize(front: ReplicaFront, body: bytes) -> DetokenizeAnswer:
    given = _parse(body, DetokenizeRequest)
    _check_model(front, given.model)
    encoder = front.prompts.encoder
    check_token_ids(given.tokens, vocab_size=encoder.vocab_size, param="tokens")
    return DetokenizeAnswer(encoder.decode(given.tokens, skip_special_tokens=False))


def _check_model(front: ReplicaFront, model: str | None) -> None:
    if model is not None:
        front.require_model(model)


def _parse(body: bytes, kind: type[StructT]) -> StructT:
    fields: dict[str, Any] = parse_object(body)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError("invalid_request", f"{param}: {problem}", param=param)
