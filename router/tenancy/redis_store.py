"""The tenant store in Redis: three hashes under one version, and the audit log as a stream.

A record that cannot be read (written by a newer version of ours) is logged and left out: its key
is then unknown, and everything else goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from kvindex.redis_connect import dependency_errors
from router.config import TenantConfig
from router.tenancy.redis_state import PREFIX, state_script
from router.tenancy.stored import (
    AuditRecord,
    StaleDirectory,
    StoredAdmin,
    StoredDirectory,
    StoredKey,
    Write,
    writes_of,
)

log = logging.getLogger("prefixfleet.router.tenancy")

_MAX_AUDITS = 100_000
_AUDIT = f"{PREFIX}audit"
_HEAD = f"{PREFIX}head"
_LOAD = state_script("load")
_CHANGE = state_script("change")
_RESTORE = state_script("restore")

_encoder = msgspec.json.Encoder()
R = TypeVar("R")


class RedisTenantStore:
    """`TenantStore` over a Redis >= 6.2 or Valkey server; the client is closed with it."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def load(self) -> StoredDirectory | None:
        """Return everything at one moment."""
        answer = await _LOAD.run(self._redis, PREFIX)
        if not answer:
            return None
        generation, version, tenants, keys, admins = answer
        return StoredDirectory(
            generation=generation.decode(),
            version=int(version),
            tenants=_read(tenants, TenantConfig),
            keys=_read(keys, StoredKey),
            admins=_read(admins, StoredAdmin),
        )

    async def mark(self) -> str:
        """Return generation and version."""
        with dependency_errors(self._redis):
            found: Any = await self._redis.hmget(_HEAD, ["generation", "version"])
        generation, version = found
        return "" if generation is None else f"{generation.decode()}:{int(version or 0)}"

    async def change(self, writes: Sequence[Write], *, mark: str) -> None:
        """Apply all writes."""
        if not await _CHANGE.run(self._redis, PREFIX, mark, *_arguments(writes)):
            raise StaleDirectory

    async def restore(self, directory: StoredDirectory) -> bool:
        """Fill the store unless it holds something newer or somebody else's."""
        arguments = _arguments(writes_of(directory))
        done = await _RESTORE.run(
            self._redis, PREFIX, directory.generation, directory.version, *arguments
        )
        return bool(done)

    async def audit(self, record: AuditRecord) -> None:
        """Append to the audit log."""
        with dependency_errors(self._redis):
            await self._redis.xadd(
                _AUDIT, {"r": _encoder.encode(record)}, maxlen=_MAX_AUDITS, approximate=True
            )

    async def audits(self, *, limit: int) -> list[AuditRecord]:
        """Return the newest records of the audit log."""
        with dependency_errors(self._redis):
            entries: Any = await self._redis.xrevrange(_AUDIT, count=limit)
        return [msgspec.json.decode(fields[b"r"], type=AuditRecord) for _, fields in entries]

    async def close(self) -> None:
        """Release connections."""
        with dependency_errors(self._redis):
            await self._redis.aclose()


def _arguments(writes: Sequence[Write]) -> list[bytes | str]:
    """Return kind, id and JSON of each write, as the scripts take them."""
    arguments: list[bytes | str] = []
    for write in writes:
        value = b"" if write.value is None else _encoder.encode(write.value)
        arguments += [write.kind, write.id, value]
    return arguments


def _read(flat: list[bytes], kind: type[R]) -> tuple[R, ...]:
    """Return the records of a hash, by id."""
    records = []
    for id, data in sorted(zip(flat[::2], flat[1::2], strict=True)):
        try:
            records.append(msgspec.json.decode(data, type=kind))
        except msgspec.DecodeError as error:
            log.error("stored %s %s cannot be read: %s", kind.__name__, id.decode()[:64], error)
    return tuple(records)
