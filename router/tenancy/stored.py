"""Tenants, keys and admins that the admin API has made: their records, and where they are kept.

What a configuration file declares is never stored here. Keys are known by their SHA-256 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from router.config import Name, Sha256Hex, TenantConfig, TenantKey

Role = Literal["admin", "viewer", "tenant-admin"]
Kind = Literal["tenants", "keys", "admins"]


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key of one tenant; `created_at` in seconds since the Unix epoch."""

    tenant: Name
    key: TenantKey
    created_at: float


class StoredAdmin(msgspec.Struct, frozen=True, kw_only=True):
    """An admin key: what it may do, and for a tenant-admin with which tenant."""

    hash: Sha256Hex
    alias: Annotated[str, msgspec.Meta(min_length=1)]
    role: Role
    tenant: Name | None = None
    expires_at: float | None = None
    created_at: float = 0.0


class StoredDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is stored. `generation` names who filled the store, `version` counts changes.

    Of two states of one generation, the one with the higher version is the newer.
    """

    generation: str
    version: int
    tenants: tuple[TenantConfig, ...] = ()
    keys: tuple[StoredKey, ...] = ()
    admins: tuple[StoredAdmin, ...] = ()

    @property
    def mark(self) -> str:
        """Generation and version as every answer of the limiter carries them."""
        return f"{self.generation}:{self.version}"


class Write(NamedTuple):
    """One change: `value` None deletes."""

    kind: Kind
    id: str
    value: TenantConfig | StoredKey | StoredAdmin | None


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One admin call that could change something: who, what, when, before, after; no secrets."""

    at: float
    request_id: str
    actor: str
    role: str
    action: str
    status: int
    before: Any = None
    after: Any = None


class TenantStore(Protocol):
    """Keeps the directory and the audit log; DependencyError when unreachable."""

    async def load(self) -> StoredDirectory | None:
        """Return everything at one moment, None when nothing was ever stored."""
        ...

    async def mark(self) -> str:
        """Return the `mark` of what is stored, "" when nothing ever was."""
        ...

    async def change(self, writes: Sequence[Write], *, mark: str) -> None:
        """Apply all writes to the directory of that mark.

        Raises StaleDirectory, and changes nothing, when the store holds another or is empty: only
        `restore` begins a generation.
        """
        ...

    async def restore(self, directory: StoredDirectory) -> bool:
        """Fill an empty store, or one that holds an older state of the generation; else False."""
        ...

    async def audit(self, record: AuditRecord) -> None:
        """Append to the audit log."""
        ...

    async def audits(self, *, limit: int) -> list[AuditRecord]:
        """Return the newest records of the audit log, newest first."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class StaleDirectory(Exception):
    """Raised when a change was made from a directory that is not the store's; load and repeat."""


def writes_of(directory: StoredDirectory) -> list[Write]:
    """Return the writes that make an empty directory this one."""
    return [
        *(Write("tenants", tenant.name, tenant) for tenant in directory.tenants),
        *(Write("keys", entry.key.hash, entry) for entry in directory.keys),
        *(Write("admins", admin.hash, admin) for admin in directory.admins),
    ]
