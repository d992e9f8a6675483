"""The tenant store in memory: for tests, and for a gateway without Redis.

There the snapshot on disk is what outlives the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from router.tenancy.stored import (
    AuditRecord,
    StaleDirectory,
    StoredDirectory,
    Write,
    writes_of,
)

_MAX_AUDITS = 10_000


class MemoryTenantStore:
    """`TenantStore` in this process."""

    def __init__(self) -> None:
        self._directory: StoredDirectory | None = None
        self._audits: deque[AuditRecord] = deque(maxlen=_MAX_AUDITS)

    async def load(self) -> StoredDirectory | None:
        """Return everything."""
        return self._directory

    async def mark(self) -> str:
        """Return generation and version."""
        return "" if self._directory is None else self._directory.mark

    async def change(self, writes: Sequence[Write], *, mark: str) -> None:
        """Apply all writes."""
        held = self._directory
        if held is None or held.mark != mark:
            raise StaleDirectory
        records = {(kind, id): value for kind, id, value in [*writes_of(held), *writes]}
        kinds: dict[str, Any] = {
            kind: tuple(
                value
                for (of, _), value in sorted(records.items())
                if of == kind and value is not None
            )
            for kind in ("tenants", "keys", "admins")
        }
        self._directory = msgspec.structs.replace(held, version=held.version + 1, **kinds)

    async def restore(self, directory: StoredDirectory) -> bool:
        """Fill the store unless it holds something newer or somebody else's."""
        held = self._directory
        if held is not None and (
            held.generation != directory.generation or held.version >= directory.version
        ):
            return False
        self._directory = directory
        return True

    async def audit(self, record: AuditRecord) -> None:
        """Append to the audit log."""
        self._audits.append(record)

    async def audits(self, *, limit: int) -> list[AuditRecord]:
        """Return the newest records of the audit log."""
        return list(self._audits)[::-1][:limit]

    async def close(self) -> None:
        """Do nothing."""
