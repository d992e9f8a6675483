"""The two aiohttp applications of a gateway and their routes.

Which handler answers what, and in which order the middlewares stand; nothing else.
"""

from __future__ import annotations

from aiohttp import web

from router.api import admin, health, index_explain, openai
from router.api.http import name_request, shape_errors
from router.assembly import Gateway


def build_client_app(gateway: Gateway) -> web.Application:
    """Build the application for clients.

    Serve it with `handler_cancellation=True`: that is how a client's going away reaches the
    replica.
    """
    app = web.Application(middlewares=[shape_errors], client_max_size=gateway.config.max_body_bytes)
    app[openai.GATEWAY] = gateway
    app.on_response_prepare.append(name_request)
    app.router.add_post("/v1/chat/completions", openai.chat_completions)
    app.router.add_post("/v1/completions", openai.completions)
    app.router.add_get("/v1/models", openai.models)
    app.router.add_get("/v1/models/{model:.+}", openai.model)
    app.router.add_get("/health", health.health)
    app.router.add_get("/ready", health.ready)
    return app


def build_admin_app(gateway: Gateway) -> web.Application:
    """Build the application for operators."""
    app = web.Application(middlewares=[shape_errors, admin.admin_only])
    app[openai.GATEWAY] = gateway
    app.on_response_prepare.append(name_request)
    app.router.add_get("/admin/replicas", admin.replicas)
    app.router.add_post("/admin/replicas/{id}/reset_prefix_cache", admin.reset_prefix_cache)
    app.router.add_get("/admin/decisions/{id}", admin.decision)
    app.router.add_post("/admin/index/explain", index_explain.explain)
    app.router.add_get("/metrics", admin.metrics)
    app.router.add_get("/health", health.health)
    app.router.add_get("/ready", health.ready)
    return app
