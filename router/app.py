"""The two aiohttp applications of a gateway and their routes.

Which handler answers what, and in which order the middlewares stand; nothing else.
"""

from __future__ import annotations

from aiohttp import web

from router.api import (
    access,
    admin,
    admin_config,
    admin_policy,
    admin_tenants,
    counts,
    description,
    health,
    index_explain,
    index_hot,
    live,
    openai,
    playground,
    tokenize,
    ui,
    usage,
)
from router.api.http import insist_on_tls, name_request, shape_errors
from router.assembly import Gateway
from router.retire import close_when_retiring


def build_client_app(gateway: Gateway) -> web.Application:
    """Build the application for clients.

    Serve it with `handler_cancellation=True`: that is how a client's going away reaches the
    replica.
    """
    app = web.Application(middlewares=[shape_errors], client_max_size=gateway.config.max_body_bytes)
    app[openai.GATEWAY] = gateway
    app.on_response_prepare.append(name_request)
    app.on_response_prepare.append(close_when_retiring)
    app.router.add_post("/v1/chat/completions", openai.chat_completions)
    app.router.add_post("/v1/completions", openai.completions)
    app.router.add_post("/v1/responses", openai.responses)
    app.router.add_get("/v1/models", openai.models)
    app.router.add_get("/v1/models/{model:.+}", openai.model)
    app.router.add_get("/v1/usage", usage.own)
    app.router.add_post("/tokenize", tokenize.tokenize_text)
    app.router.add_post("/detokenize", tokenize.detokenize_ids)
    app.router.add_get("/health", health.health)
    app.router.add_get("/ready", health.ready)
    app.router.add_get("/openapi.json", description.openapi)
    return app


def build_admin_app(gateway: Gateway) -> web.Application:
    """Build the application for operators."""
    app = web.Application(middlewares=[shape_errors, access.admin_only])
    app[openai.GATEWAY] = gateway
    app.on_response_prepare.append(name_request)
    app.on_response_prepare.append(insist_on_tls)
    app.on_response_prepare.append(close_when_retiring)
    app.router.add_get("/admin/replicas", admin.replicas)
    app.router.add_post("/admin/replicas/{id}/reset_prefix_cache", admin.reset_prefix_cache)
    app.router.add_get("/admin/decisions", live.decisions)
    app.router.add_get("/admin/decisions/{id}", admin.decision)
    app.router.add_get("/admin/live", live.live)
    app.router.add_get("/admin/counts", counts.counts)
    app.router.add_get("/admin/index/hot", index_hot.hot)
    app.router.add_post("/admin/playground", playground.play)
    for path in ("/ui", "/ui/"):
        app.router.add_get(path, ui.page)
    app.router.add_get("/ui/{name}", ui.asset)
    app.router.add_post("/admin/index/explain", index_explain.explain)
    _add_tenancy(app)
    app.router.add_get("/metrics", admin.metrics)
    app.router.add_get("/health", health.health)
    app.router.add_get("/ready", health.ready)
    return app


def _add_tenancy(app: web.Application) -> None:
    tenant, key = "/admin/tenants/{tenant}", "/admin/tenants/{tenant}/keys/{key}"
    app.router.add_get("/admin/tenants", admin_tenants.list_tenants)
    app.router.add_post("/admin/tenants", admin_tenants.create_tenant)
    app.router.add_get(tenant, admin_tenants.get_tenant)
    app.router.add_patch(tenant, admin_tenants.update_tenant)
    app.router.add_delete(tenant, admin_tenants.delete_tenant)
    app.router.add_get("/admin/policies", admin_policy.policies)
    app.router.add_post(f"{tenant}/policy/dry-run", admin_policy.dry_run)
    app.router.add_get(f"{tenant}/keys", admin_tenants.list_keys)
    app.router.add_post(f"{tenant}/keys", admin_tenants.create_key)
    app.router.add_patch(key, admin_tenants.update_key)
    app.router.add_delete(key, admin_tenants.delete_key)
    app.router.add_post(f"{key}/block", admin_tenants.block_key)
    app.router.add_post(f"{key}/unblock", admin_tenants.unblock_key)
    app.router.add_post(f"{key}/rotate", admin_tenants.rotate_key)
    app.router.add_get("/admin/admins", admin_tenants.list_admins)
    app.router.add_post("/admin/admins", admin_tenants.create_admin)
    app.router.add_delete("/admin/admins/{alias}", admin_tenants.delete_admin)
    app.router.add_get("/admin/usage", usage.totals)
    app.router.add_get("/admin/usage/records", usage.records)
    app.router.add_get("/admin/audit", usage.audit)
    app.router.add_get("/admin/config", admin_config.show)
    app.router.add_post("/admin/config/reload", admin_config.reload)
