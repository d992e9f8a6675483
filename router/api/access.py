"""Who may do what on the admin listener, and the audit log of what was done.

One middleware for every route under /admin: it tells roles apart by method and path alone, so that
no handler can forget to ask, and writes down whatever could change something.
"""

from __future__ import annotations

import hmac
import logging
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from engine.frontend.errors import RequestError
from kvindex.foundation.errors import DependencyError
from router.api.http import REQUEST_ID, Handler
from router.api.openai import GATEWAY
from router.assembly import Gateway
from router.request.auth import bearer_key
from router.tenancy.stored import AuditRecord, Role
from router.tenancy.tenants import hash_key

log = logging.getLogger("prefixfleet.audit")

READ_ONLY_POSTS = frozenset({"/admin/index/explain", "/admin/tenants/{tenant}/policy/dry-run"})
"""Routes that take a body, and change nothing."""


class Admin(NamedTuple):
    """Whoever calls the admin API; `tenant` is set for a tenant-admin alone."""

    name: str
    role: Role
    tenant: str | None = None


ADMIN = web.RequestKey("admin", Admin)
CHANGE = web.RequestKey("change", tuple[Any, Any])
"""What a handler changed, before and after, in builtins and without secrets."""


@web.middleware
async def admin_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for an admin key on everything under /admin, also where there is nothing."""
    if request.path != "/admin" and not request.path.startswith("/admin/"):
        return await handler(request)
    gateway = request.app[GATEWAY]
    # What another gateway was told a moment ago counts here, for who may call and what is shown.
    await gateway.tenancy.catch_up()
    admin = request[ADMIN] = _identify(gateway, request)
    if _reads(request):
        _require(admin, request)
        return await _answered(request, handler)
    status = 500
    try:
        _require(admin, request)
        response = await _answered(request, handler)
        status = response.status
        return response
    except RequestError as error:
        status = error.shape.status
        raise
    except web.HTTPException as error:
        status = error.status
        raise
    finally:
        await _audit(gateway, request, admin, status)


async def is_still_admitted(request: web.Request) -> bool:
    """Tell whether the key that was sent is good now, too; for an answer that goes on for long."""
    gateway = request.app[GATEWAY]
    await gateway.tenancy.catch_up()
    try:
        return _identify(gateway, request) == request[ADMIN]
    except RequestError:
        return False


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 503 for a store that is away, with its name: operators may know it."""
    try:
        return await handler(request)
    except DependencyError as error:
        raise RequestError("dependency", str(error), retry_after_s=1.0) from None


def _identify(gateway: Gateway, request: web.Request) -> Admin:
    """Return whose admin key was sent; raise RequestError `unauthorized`."""
    sent = bearer_key(request.headers) or ""
    if hmac.compare_digest(sent.encode("utf-8", "surrogatepass"), gateway.admin_key.encode()):
        return Admin("fleet", "admin")
    stored = gateway.tenancy.live.stored
    hashed, now = hash_key(sent), gateway.clock.now()
    for admin in stored.admins if stored is not None else ():
        if admin.hash == hashed and (admin.expires_at is None or now < admin.expires_at):
            return Admin(admin.alias, admin.role, admin.tenant)
    raise RequestError("unauthorized", "this needs an admin key of the fleet")


def _require(admin: Admin, request: web.Request) -> None:
    """Raise RequestError `forbidden` unless the role covers the method and path."""
    if admin.role == "admin":
        return
    if admin.role == "viewer":
        if not _reads(request):
            raise RequestError("forbidden", "a viewer's admin key reads, and changes nothing")
        return
    own = f"/admin/tenants/{admin.tenant}"
    if request.path.startswith(f"{own}/keys"):
        return
    is_readable = request.path in (own, f"{own}/policy/dry-run") or request.path.startswith(
        "/admin/usage"
    )
    if _reads(request) and is_readable:
        return
    raise RequestError(
        "forbidden", f"this admin key is for the keys and the usage of {admin.tenant} alone"
    )


def _reads(request: web.Request) -> bool:
    if request.method in ("GET", "HEAD"):
        return True
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical in READ_ONLY_POSTS


async def _audit(gateway: Gateway, request: web.Request, admin: Admin, status: int) -> None:
    """Write down one call; without the store, the log line has to do."""
    before, after = request.get(CHANGE, (None, None))
    record = AuditRecord(
        at=gateway.clock.now(),
        request_id=request[REQUEST_ID],
        actor=admin.name,
        role=admin.role,
        action=f"{request.method} {request.path}",
        status=status,
        before=before,
        after=after,
    )
    log.info("%s", msgspec.json.encode(record).decode())
    try:
        await gateway.tenancy.live.store.audit(record)
    except DependencyError as error:
        log.error("audit log unreachable request_id=%s: %s", record.request_id, error)
