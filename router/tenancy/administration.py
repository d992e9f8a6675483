"""Changes to tenants, keys and admins: what may be changed, and what comes of it.

Each change is made from the directory that the store holds at that moment, and made again from a
newer one if somebody was faster. It knows no HTTP and no roles.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.parse import invalid_field
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from kvindex.foundation.text_forms import text_form
from router.config import Limits, Name, Sha256Hex, TenantConfig, TenantKey
from router.tenancy.live_directory import LiveDirectory
from router.tenancy.stored import (
    Role,
    StaleDirectory,
    StoredAdmin,
    StoredDirectory,
    StoredKey,
    Write,
)
from router.tenancy.tenants import hash_key

R = TypeVar("R", TenantConfig, TenantKey)
T = TypeVar("T")

_MAX_ATTEMPTS = 16
_PAUSE_S = 0.02
_MIN_HASH_CHARS = 8
Alias = Annotated[
    str,
    text_form(
        r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$",
        "a name (1 to 64 of a-z A-Z 0-9 . _ @ -, the first a letter or digit)",
    ),
]

_Plan = tuple[T, list[Write]]
"""What a change comes to, and the writes that make it."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for a new key; `hash` takes over a key that exists elsewhere."""

    alias: Alias
    owner: str = ""
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    expires_at: float | None = None
    hash: Sha256Hex | None = None


class NewAdmin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for a new admin key; a tenant-admin needs its `tenant`."""

    alias: Alias
    role: Role
    tenant: Name | None = None
    expires_at: float | None = None


class MadeKey(NamedTuple):
    """A stored key and, only now, the key itself (None where it exists elsewhere)."""

    entry: StoredKey
    clear: str | None


class Administration:
    """Makes changes; every method raises RequestError, or DependencyError without the store.

    `declared_in` names the file that declares tenants.
    """

    def __init__(self, live: LiveDirectory, *, clock: Clock, declared_in: str) -> None:
        self._live = live
        self._clock = clock
        self._declared_in = declared_in
        self._changing = asyncio.Lock()

    async def create_tenant(self, tenant: TenantConfig) -> TenantConfig:
        """Add a tenant, without keys."""

        def plan(stored: StoredDirectory) -> _Plan[TenantConfig]:
            if self._live.current.tenant(tenant.name) is not None:
                raise RequestError("conflict", f"the tenant {tenant.name!r} exists already")
            self._check(tenant)
            return tenant, [Write("tenants", tenant.name, tenant)]

        return await self._change(plan)

    async def update_tenant(
        self, name: str, patch: Mapping[str, Any]
    ) -> tuple[TenantConfig, TenantConfig]:
        """Merge a patch into a tenant (RFC 7396); return it before and after."""

        def plan(stored: StoredDirectory) -> _Plan[tuple[TenantConfig, TenantConfig]]:
            before = self._stored_tenant(stored, name)
            after = _patched(before, patch, frozen=("name", "keys"))
            self._check(after)
            return (before, after), [Write("tenants", name, after)]

        return await self._change(plan)

    async def delete_tenant(self, name: str) -> TenantConfig:
        """Remove a tenant and all of its keys."""

        def plan(stored: StoredDirectory) -> _Plan[TenantConfig]:
            removed = self._stored_tenant(stored, name)
            keys = [entry.key.hash for entry in stored.keys if entry.tenant == name]
            writes = [Write("tenants", name, None), *(Write("keys", hash, None) for hash in keys)]
            return removed, writes

        return await self._change(plan)

    async def create_key(self, tenant: str, asked: NewKey) -> MadeKey:
        """Add a key to a tenant, a declared one too; the clear key is in the answer alone."""
        clear = None if asked.hash is not None else new_key()
        key = TenantKey(
            hash=asked.hash or hash_key(clear or ""),
            alias=asked.alias,
            owner=asked.owner,
            models=asked.models,
            limits=asked.limits,
            expires_at=asked.expires_at,
        )
        entry = StoredKey(tenant=tenant, key=key, created_at=self._clock.now())

        def plan(stored: StoredDirectory) -> _Plan[MadeKey]:
            self.require_tenant(tenant)
            self._check_new_key(stored, entry)
            return MadeKey(entry, clear), [Write("keys", key.hash, entry)]

        return await self._change(plan)

    async def update_key(
        self, tenant: str, id: str, patch: Mapping[str, Any]
    ) -> tuple[StoredKey, StoredKey]:
        """Merge a patch into a key (RFC 7396), `{"blocked": true}` say; return before and after."""

        def plan(stored: StoredDirectory) -> _Plan[tuple[StoredKey, StoredKey]]:
            before = self._stored_key(stored, tenant, id)
            key = _patched(before.key, patch, frozen=("hash", "alias"))
            after = msgspec.structs.replace(before, key=key)
            return (before, after), [Write("keys", key.hash, after)]

        return await self._change(plan)

    async def rotate_key(self, tenant: str, id: str, *, grace_s: float) -> MadeKey:
        """Replace a key by a new one of the same rights; the old one works for `grace_s` more."""
        clear, now = new_key(), self._clock.now()

        def plan(stored: StoredDirectory) -> _Plan[MadeKey]:
            old = self._stored_key(stored, tenant, id)
            ends_at = min(now + grace_s, old.key.expires_at or now + grace_s)
            retired = msgspec.structs.replace(
                old.key, alias=f"{old.key.alias}.{old.key.hash[:8]}", expires_at=ends_at
            )
            key = msgspec.structs.replace(old.key, hash=hash_key(clear), blocked=False)
            entry = StoredKey(tenant=tenant, key=key, created_at=now)
            return MadeKey(entry, clear), [
                Write("keys", old.key.hash, msgspec.structs.replace(old, key=retired)),
                Write("keys", key.hash, entry),
            ]

        return await self._change(plan)

    async def delete_key(self, tenant: str, id: str) -> StoredKey:
        """Remove a key."""

        def plan(stored: StoredDirectory) -> _Plan[StoredKey]:
            removed = self._stored_key(stored, tenant, id)
            return removed, [Write("keys", removed.key.hash, None)]

        return await self._change(plan)

    async def create_admin(self, asked: NewAdmin) -> tuple[StoredAdmin, str]:
        """Add an admin key; the clear key is in the answer alone."""
        if (asked.role == "tenant-admin") != (asked.tenant is not None):
            raise RequestError(
                "invalid_request",
                "tenant: a tenant-admin needs one, other roles have none",
                param="tenant",
            )
        clear = f"pf-admin-{secrets.token_urlsafe(24)}"
        admin = StoredAdmin(
            hash=hash_key(clear),
            alias=asked.alias,
            role=asked.role,
            tenant=asked.tenant,
            expires_at=asked.expires_at,
            created_at=self._clock.now(),
        )

        def plan(stored: StoredDirectory) -> _Plan[tuple[StoredAdmin, str]]:
            if asked.tenant is not None:
                self.require_tenant(asked.tenant)
            if any(other.alias == asked.alias for other in stored.admins):
                raise RequestError("conflict", f"an admin key {asked.alias!r} exists already")
            return (admin, clear), [Write("admins", admin.hash, admin)]

        return await self._change(plan)

    async def delete_admin(self, alias: str) -> StoredAdmin:
        """Remove an admin key."""

        def plan(stored: StoredDirectory) -> _Plan[StoredAdmin]:
            found = [admin for admin in stored.admins if admin.alias == alias]
            if not found:
                raise RequestError("not_found", f"there is no admin key {alias!r}")
            return found[0], [Write("admins", found[0].hash, None)]

        return await self._change(plan)

    def require_tenant(self, name: str) -> TenantConfig:
        """Return a tenant, declared or stored; RequestError `not_found` for any other name."""
        tenant = self._live.current.tenant(name)
        if tenant is None:
            raise RequestError("not_found", f"there is no tenant {name!r}")
        return tenant

    async def _change(self, plan: Callable[[StoredDirectory], _Plan[T]]) -> T:
        """Carry out a plan on the newest directory, as often as it takes; then follow it."""
        async with self._changing:
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                stored = await self._live.begin()
                result, writes = plan(stored)
                try:
                    await self._live.store.change(writes, mark=stored.mark)
                except StaleDirectory:
                    # In step with another gateway, one of the two might lose every time.
                    await asyncio.sleep(random.uniform(0, attempt * _PAUSE_S))
                    continue
                await self._live.follow(await self._live.store.mark())
                return result
        raise RequestError("conflict", "tenants are being changed elsewhere; try again")

    def _stored_tenant(self, stored: StoredDirectory, name: str) -> TenantConfig:
        if name in self._live.current.declared:
            raise self._is_declared(f"the tenant {name!r}")
        found = [tenant for tenant in stored.tenants if tenant.name == name]
        if not found:
            raise RequestError("not_found", f"there is no tenant {name!r}")
        return found[0]

    def _stored_key(self, stored: StoredDirectory, tenant: str, id: str) -> StoredKey:
        declared = self.require_tenant(tenant).keys
        found = [e for e in stored.keys if e.tenant == tenant and _is_called(e.key, id)]
        if len(found) == 1:
            return found[0]
        if any(_is_called(key, id) for key in declared):
            raise self._is_declared(f"the key {id!r}")
        problem = "means several keys" if found else "is no key"
        raise RequestError("not_found", f"{id!r} {problem} of the tenant {tenant!r}")

    def _is_declared(self, what: str) -> RequestError:
        return RequestError(
            "conflict",
            f"{what} is declared in {self._declared_in}; change it there, then `prefixfleet "
            "config reload`",
        )

    def _check(self, tenant: TenantConfig) -> None:
        """Raise RequestError for a tenant that could not be served."""
        if tenant.keys or tenant.anonymous:
            field = "keys" if tenant.keys else "anonymous"
            remedy = "add keys one by one" if tenant.keys else "declare it in the configuration"
            raise RequestError("invalid_request", f"{field}: {remedy}", param=field)
        try:
            self._live.check(tenant)
        except ConfigError as error:
            raise RequestError("invalid_request", str(error), param="policy") from None

    def _check_new_key(self, stored: StoredDirectory, entry: StoredKey) -> None:
        keys = [other.key for other in stored.keys if other.tenant == entry.tenant]
        keys += self.require_tenant(entry.tenant).keys
        if any(key.alias == entry.key.alias for key in keys):
            raise RequestError(
                "conflict", f"the tenant {entry.tenant!r} has a key {entry.key.alias!r} already"
            )
        if self._live.current.holds(entry.key.hash):
            raise RequestError("conflict", "a tenant holds this key already")


def new_key() -> str:
    """Return a new API key."""
    return f"sk-{secrets.token_urlsafe(32)}"


def _is_called(key: TenantKey, id: str) -> bool:
    return key.alias == id or (len(id) >= _MIN_HASH_CHARS and key.hash.startswith(id))


def _patched(record: R, patch: Mapping[str, Any], *, frozen: tuple[str, ...]) -> R:
    for name in frozen:
        if name in patch:
            raise RequestError("invalid_request", f"{name}: cannot be changed", param=name)
    merged = merge(msgspec.to_builtins(record), patch)
    try:
        return msgspec.convert(merged, type(record))
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def merge(value: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): null removes, objects merge, all else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(value) if isinstance(value, Mapping) else {}
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), change)
    return merged
