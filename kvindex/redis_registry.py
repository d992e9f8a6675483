"""The registry in Redis: one hash of signed records, each with the instant of its lapse; claims.

It judges signatures, not whether a record fits a pool (kvindex/registry.py does).
"""

from __future__ import annotations

import logging

from redis.asyncio import Redis

from kvindex.foundation.errors import WireError
from kvindex.redis_connect import dependency_errors
from kvindex.redis_script import RedisScript
from kvindex.registry import ReplicaRecord, sign_record, verify_record

logger = logging.getLogger("prefixfleet.kvindex.registry")

KEY = "pf:{registry}:records"
CLAIM_KEY = "pf:{registry}:claim:"
_PUBLISH = RedisScript("registry_publish")
_RECORDS = RedisScript("registry_records")
_CLAIM = RedisScript("registry_claim")
_UNCLAIM = RedisScript("registry_unclaim")


class RedisRegistry:
    """`Registry` over a Redis >= 6.2 or Valkey server; the client is closed with it."""

    def __init__(self, redis: Redis, secret: bytes) -> None:
        self._redis = redis
        self._secret = secret
        self._refused: set[bytes] = set()

    async def publish(self, record: ReplicaRecord, *, lease_s: float) -> None:
        """Write or refresh a record; it disappears when not refreshed for `lease_s`."""
        signed = sign_record(record, self._secret)
        await _PUBLISH.run(self._redis, KEY, record.id, round(lease_s * 1000), signed)

    async def withdraw(self, replica_id: str) -> None:
        """Remove a record at once."""
        with dependency_errors(self._redis):
            await self._redis.hdel(KEY, replica_id)

    async def records(self) -> list[ReplicaRecord]:
        """List the verified records; forged or unreadable ones are logged once and left out."""
        flat: list[bytes] = await _RECORDS.run(self._redis, KEY)
        records: list[ReplicaRecord] = []
        refused: set[bytes] = set()
        for replica_id, blob in zip(flat[::2], flat[1::2], strict=True):
            try:
                records.append(_verify(replica_id, blob, self._secret))
            except WireError as error:
                refused.add(replica_id)
                if replica_id not in self._refused:
                    logger.warning("replica=%r refused: %s", replica_id, error)
        self._refused = refused
        return sorted(records, key=lambda record: record.id)

    async def claim(self, name: str, owner: str, *, lease_s: float) -> bool:
        """Take a task that only one process may do, or keep it; False while another has it."""
        lease_ms = round(lease_s * 1000)
        return bool(await _CLAIM.run(self._redis, CLAIM_KEY + name, owner, lease_ms))

    async def unclaim(self, name: str, owner: str) -> None:
        """Give a task back; what another has stays with it."""
        await _UNCLAIM.run(self._redis, CLAIM_KEY + name, owner)

    async def close(self) -> None:
        """Release connections."""
        with dependency_errors(self._redis):
            await self._redis.aclose()


def _verify(replica_id: bytes, blob: bytes, secret: bytes) -> ReplicaRecord:
    record = verify_record(blob, secret)
    if record.id.encode() != replica_id:
        raise WireError(f"replica record: it is of {record.id!r}")
    return record
