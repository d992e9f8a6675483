"""POST /admin/playground: a prompt sent as a tenant, its answer, and why it went where it went.

It takes the path of a client's request, so it is limited, charged and recorded like one.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from router.api.http import REQUEST_ID, decode_as, json_response, read_json
from router.api.openai import GATEWAY, serve_as
from router.assembly import Gateway
from router.observe.decisions import DecisionRecord
from router.tenancy.tenants import Identity


class PlaygroundRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt; a `model` that the tenant may use."""

    tenant: str
    model: str
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0


class PlaygroundAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The chat completion as the tenant would get it, and the decision behind it."""

    answer: msgspec.Raw
    decision: DecisionRecord | None


async def play(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/playground."""
    gateway = request.app[GATEWAY]
    body = await read_json(request, timeout_s=gateway.config.body_timeout_s)
    wanted = decode_as(body, PlaygroundRequest)
    identity = _identity(gateway, wanted.tenant)
    chat = {
        "model": wanted.model,
        "messages": [{"role": "user", "content": wanted.prompt}],
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
    }
    answer = await serve_as(identity, request, msgspec.json.encode(chat))
    decision = gateway.decisions.get(request[REQUEST_ID])
    return json_response(PlaygroundAnswer(answer=msgspec.Raw(answer), decision=decision))


def _identity(gateway: Gateway, tenant: str) -> Identity:
    try:
        return gateway.directory.act_as(tenant)
    except RequestError as error:
        raise RequestError("not_found", error.message, param="tenant") from None
