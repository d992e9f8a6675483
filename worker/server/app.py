"""The routes of a replica and the order of its middlewares.

It knows which handler answers what, and nothing of processes or signals (lifecycle.py).
"""

from __future__ import annotations

from aiohttp import web

from worker.server import adapter_api, description, generate_api, render_api, side_api, sleep_api
from worker.server.front import ReplicaFront
from worker.server.http import echo_request_id, require_bearer, shape_errors


def build_app(front: ReplicaFront) -> web.Application:
    """Build the application of one replica.

    Serve it with `handler_cancellation=True`: that is how a client's going away aborts its work.
    """
    spec = front.spec
    auth = require_bearer(spec.internal_token or spec.api_key, required=spec.in_fleet)
    app = web.Application(middlewares=[shape_errors, auth], client_max_size=spec.max_body_bytes)
    app[generate_api.FRONT] = front
    app.on_response_prepare.append(echo_request_id)
    app.router.add_post("/v1/chat/completions", generate_api.chat_completions)
    app.router.add_post("/v1/completions", generate_api.completions)
    app.router.add_post("/v1/responses", generate_api.responses)
    app.router.add_post("/v1/chat/completions/render", render_api.render_chat)
    app.router.add_post("/v1/completions/render", render_api.render_completion)
    app.router.add_get("/kv_event_sources", render_api.kv_event_sources)
    app.router.add_get("/v1/models", side_api.models)
    app.router.add_get("/model_info", side_api.model_info)
    app.router.add_post("/v1/load_lora_adapter", adapter_api.load)
    app.router.add_post("/v1/unload_lora_adapter", adapter_api.unload)
    app.router.add_get("/health", side_api.health)
    app.router.add_get("/openapi.json", description.openapi)
    app.router.add_get("/metrics", side_api.metrics)
    app.router.add_get("/kv/snapshot", side_api.kv_snapshot)
    app.router.add_post("/kv/rebuild", side_api.kv_rebuild)
    app.router.add_post("/kv/resize", side_api.kv_resize)
    app.router.add_post("/reset_prefix_cache", side_api.reset_prefix_cache)
    app.router.add_post("/pause", side_api.pause)
    app.router.add_post("/resume", side_api.resume)
    app.router.add_get("/is_paused", side_api.is_paused)
    app.router.add_post("/sleep", sleep_api.sleep)
    app.router.add_post("/wake_up", sleep_api.wake_up)
    app.router.add_get("/is_sleeping", sleep_api.is_sleeping)
    app.router.add_post("/update_weights", sleep_api.update_weights)
    app.router.add_get("/tokenizer", side_api.tokenizer)
    app.router.add_post("/tokenize", side_api.tokenize_text)
    app.router.add_post("/detokenize", side_api.detokenize_ids)
    return app
