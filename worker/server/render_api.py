"""What routers of other make ask a replica: where its KV events are, and how it sees a prompt.

Paths and shapes are vLLM's. It generates nothing; who may ask is decided before it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.parse import parse_chat_request, parse_completion_request
from worker.server.front import ReplicaFront
from worker.server.generate_api import FRONT
from worker.server.http import REQUEST_ID, json_response, read_json_body


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the model would see it; `sampling_params` are left to the request itself."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    cache_salt: str | None = None


async def kv_event_sources(request: web.Request) -> web.Response:
    """Say where each rank publishes events that carry tokens; none does unless it is asked to."""
    front = request.app[FRONT]
    sources = {
        str(rank): front.spec.kv_events.source(
            endpoint=places.endpoint, replay_endpoint=places.replay_endpoint
        )
        for rank, core in enumerate(front.client.ranks)
        if (places := core.info.announced) is not None
    }
    return json_response(sources)


async def render_chat(request: web.Request) -> web.Response:
    """Turn the body of a chat completion into what the model would be given."""

    def answer(front: ReplicaFront, body: bytes) -> RenderedPrompt:
        asked = parse_chat_request(body)
        front.require_model(asked.model)
        return _rendered(request, asked.model, front.prompts.chat(asked), asked.cache_salt)

    return await _answered(request, answer)


async def render_completion(request: web.Request) -> web.Response:
    """Turn the body of a completion into its prompts, one for each, as token ids."""

    def answer(front: ReplicaFront, body: bytes) -> list[RenderedPrompt]:
        asked = parse_completion_request(body)
        front.require_model(asked.model)
        return [
            _rendered(request, asked.model, tokens, asked.cache_salt)
            for tokens in front.prompts.completion(asked)
        ]

    return await _answered(request, answer)


async def _answered(
    request: web.Request, answer: Callable[[ReplicaFront, bytes], object]
) -> web.Response:
    """Read the body, and work off the event loop."""
    front = request.app[FRONT]
    body = await read_json_body(request)
    return json_response(await front.pool.run(lambda: answer(front, body)))


def _rendered(
    request: web.Request, model: str, tokens: list[int], salt: str | None
) -> RenderedPrompt:
    return RenderedPrompt(
        request_id=request[REQUEST_ID], model=model, token_ids=tokens, cache_salt=salt
    )
