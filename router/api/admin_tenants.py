"""`/admin/tenants` and the keys below: what there is, and changes to it.

A key is shown once, in the answer that made it; afterwards by its alias and the first characters of
its hash. Who may call this is access.py's business.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from router.api.access import CHANGE
from router.api.http import decode_as, json_response, read_json
from router.api.openai import GATEWAY
from router.config import Limits, TenantConfig, TenantKey
from router.tenancy.administration import MadeKey, NewAdmin, NewKey
from router.tenancy.stored import StoredAdmin, StoredKey

T = TypeVar("T")
_DEFAULT_GRACE_S = 86_400.0


class ShownKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is shown: `id` is the beginning of its hash. `key` only when it was just made."""

    id: str
    tenant: str
    alias: str
    owner: str
    models: tuple[str, ...] | None
    limits: Limits
    expires_at: float | None
    blocked: bool
    declared: bool
    created_at: float | None = None
    key: str | None = None


class ShownTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant as it is shown; `declared` ones are changed in their file only."""

    tenant: TenantConfig
    declared: bool
    keys: list[ShownKey]


class ShownAdmin(msgspec.Struct, frozen=True, kw_only=True):
    """An admin key as it is shown. `key` only when it was just made."""

    alias: str
    role: str
    tenant: str | None
    expires_at: float | None
    created_at: float
    key: str | None = None


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the old key works beside the new one."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=90 * 86_400)] = _DEFAULT_GRACE_S


async def list_tenants(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/tenants."""
    directory = request.app[GATEWAY].directory
    return json_response({"tenants": [_shown(request, t) for t in directory.tenants]})


async def get_tenant(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/tenants/{tenant}."""
    administration = request.app[GATEWAY].administration
    return json_response(
        _shown(request, administration.require_tenant(request.match_info["tenant"]))
    )


async def create_tenant(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/tenants."""
    asked = await read_as(request, TenantConfig)
    tenant = await request.app[GATEWAY].administration.create_tenant(asked)
    request[CHANGE] = None, msgspec.to_builtins(tenant)
    return json_response(_shown(request, tenant), status=201)


async def update_tenant(request: web.Request) -> web.StreamResponse:
    """Answer PATCH /admin/tenants/{tenant} with a JSON merge patch."""
    patch = await read_as(request, dict[str, Any])
    name = request.match_info["tenant"]
    before, after = await request.app[GATEWAY].administration.update_tenant(name, patch)
    request[CHANGE] = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return json_response(_shown(request, after))


async def delete_tenant(request: web.Request) -> web.StreamResponse:
    """Answer DELETE /admin/tenants/{tenant}: its keys are gone with it."""
    name = request.match_info["tenant"]
    removed = await request.app[GATEWAY].administration.delete_tenant(name)
    request[CHANGE] = msgspec.to_builtins(removed), None
    return json_response({"deleted": name})


async def list_keys(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/tenants/{tenant}/keys."""
    administration = request.app[GATEWAY].administration
    tenant = administration.require_tenant(request.match_info["tenant"])
    return json_response({"keys": _shown(request, tenant).keys})


async def create_key(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/tenants/{tenant}/keys; the only answer with the key in it."""
    asked = await read_as(request, NewKey)
    administration = request.app[GATEWAY].administration
    made = await administration.create_key(request.match_info["tenant"], asked)
    return _made(request, made, replaced=None)


async def update_key(request: web.Request) -> web.StreamResponse:
    """Answer PATCH /admin/tenants/{tenant}/keys/{key} with a JSON merge patch."""
    return await _patch_key(request, await read_as(request, dict[str, Any]))


async def block_key(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/tenants/{tenant}/keys/{key}/block: refused from the next request on."""
    return await _patch_key(request, {"blocked": True})


async def unblock_key(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/tenants/{tenant}/keys/{key}/unblock."""
    return await _patch_key(request, {"blocked": False})


async def rotate_key(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/tenants/{tenant}/keys/{key}/rotate with the new key."""
    asked = await read_as(request, Rotation)
    tenant, id = request.match_info["tenant"], request.match_info["key"]
    made = await request.app[GATEWAY].administration.rotate_key(tenant, id, grace_s=asked.grace_s)
    return _made(request, made, replaced=id)


async def delete_key(request: web.Request) -> web.StreamResponse:
    """Answer DELETE /admin/tenants/{tenant}/keys/{key}."""
    tenant, id = request.match_info["tenant"], request.match_info["key"]
    removed = await request.app[GATEWAY].administration.delete_key(tenant, id)
    request[CHANGE] = msgspec.to_builtins(_stored_key(removed)), None
    return json_response({"deleted": removed.key.alias})


async def list_admins(request: web.Request) -> web.StreamResponse:
    """Answer GET /admin/admins."""
    stored = request.app[GATEWAY].tenancy.live.stored
    admins = stored.admins if stored is not None else ()
    return json_response({"admins": [_admin(admin) for admin in admins]})


async def create_admin(request: web.Request) -> web.StreamResponse:
    """Answer POST /admin/admins; the only answer with the key in it."""
    asked = await read_as(request, NewAdmin)
    admin, clear = await request.app[GATEWAY].administration.create_admin(asked)
    request[CHANGE] = None, msgspec.to_builtins(_admin(admin))
    return json_response(_admin(admin, key=clear), status=201)


async def delete_admin(request: web.Request) -> web.StreamResponse:
    """Answer DELETE /admin/admins/{alias}."""
    removed = await request.app[GATEWAY].administration.delete_admin(request.match_info["alias"])
    request[CHANGE] = msgspec.to_builtins(_admin(removed)), None
    return json_response({"deleted": removed.alias})


async def read_as(request: web.Request, kind: type[T]) -> T:
    """Decode a body, an empty one as `{}`; raise RequestError naming the field that is wrong."""
    body = await read_json(request, timeout_s=request.app[GATEWAY].config.body_timeout_s)
    return decode_as(body or b"{}", kind)


async def _patch_key(request: web.Request, patch: dict[str, Any]) -> web.StreamResponse:
    tenant, id = request.match_info["tenant"], request.match_info["key"]
    before, after = await request.app[GATEWAY].administration.update_key(tenant, id, patch)
    request[CHANGE] = (
        msgspec.to_builtins(_stored_key(before)),
        msgspec.to_builtins(_stored_key(after)),
    )
    return json_response(_stored_key(after))


def _made(request: web.Request, made: MadeKey, *, replaced: str | None) -> web.Response:
    shown = _stored_key(made.entry)
    before = {"replaced": replaced} if replaced is not None else None
    request[CHANGE] = before, msgspec.to_builtins(shown)
    return json_response(msgspec.structs.replace(shown, key=made.clear), status=201)


def _shown(request: web.Request, tenant: TenantConfig) -> ShownTenant:
    live = request.app[GATEWAY].tenancy.live
    stored = live.stored.keys if live.stored is not None else ()
    keys = [_key(tenant.name, key, declared=True) for key in tenant.keys]
    keys += [_stored_key(entry) for entry in stored if entry.tenant == tenant.name]
    return ShownTenant(
        tenant=msgspec.structs.replace(tenant, keys=()),
        declared=tenant.name in live.current.declared,
        keys=keys,
    )


def _stored_key(entry: StoredKey) -> ShownKey:
    shown = _key(entry.tenant, entry.key, declared=False)
    return msgspec.structs.replace(shown, created_at=entry.created_at)


def _key(tenant: str, key: TenantKey, *, declared: bool) -> ShownKey:
    return ShownKey(
        id=key.hash[:16],
        tenant=tenant,
        alias=key.alias,
        owner=key.owner,
        models=key.models,
        limits=key.limits,
        expires_at=key.expires_at,
        blocked=key.blocked,
        declared=declared,
    )


def _admin(admin: StoredAdmin, *, key: str | None = None) -> ShownAdmin:
    return ShownAdmin(
        alias=admin.alias,
        role=admin.role,
        tenant=admin.tenant,
        expires_at=admin.expires_at,
        created_at=admin.created_at,
        key=key,
    )
