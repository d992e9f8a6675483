"""One registry record for a replica whose ranks are followed by an ingester each.

Every ingester publishes and withdraws the record as if it were its own; here that becomes one
record, which stays while any rank is followed. It knows no engine.
"""

from __future__ import annotations

import msgspec

from kvindex.registry import Registry, ReplicaRecord


class SharedRecord:
    """The record of one replica; its epoch is the newest of its ranks, and never goes back."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._epoch = 0
        self._followed: set[int] = set()

    def of_rank(self, dp_rank: int) -> Registry:
        """Return the registry as the ingester of a rank sees it."""
        return _RankRegistry(self, dp_rank)

    async def publish(self, dp_rank: int, record: ReplicaRecord, *, lease_s: float) -> None:
        """Write the record for a rank that is followed."""
        self._followed.add(dp_rank)
        self._epoch = max(self._epoch, record.epoch)
        shared = msgspec.structs.replace(record, epoch=self._epoch)
        await self._registry.publish(shared, lease_s=lease_s)

    async def withdraw(self, dp_rank: int, replica_id: str) -> None:
        """Remove the record when the last rank goes."""
        self._followed.discard(dp_rank)
        if not self._followed:
            await self._registry.withdraw(replica_id)

    async def records(self) -> list[ReplicaRecord]:
        """List the records of the whole fleet."""
        return await self._registry.records()


class _RankRegistry:
    """A Registry for one rank; closing it is the replica's business."""

    def __init__(self, shared: SharedRecord, dp_rank: int) -> None:
        self._shared = shared
        self._dp_rank = dp_rank

    async def publish(self, record: ReplicaRecord, *, lease_s: float) -> None:
        await self._shared.publish(self._dp_rank, record, lease_s=lease_s)

    async def withdraw(self, replica_id: str) -> None:
        await self._shared.withdraw(self._dp_rank, replica_id)

    async def records(self) -> list[ReplicaRecord]:
        return await self._shared.records()

    async def close(self) -> None:
        """Nothing: the ranks share one connection."""
