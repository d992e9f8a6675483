"""The registry in memory: for one process, in tests and in a fleet without Redis.

It is not shared between processes; records need no signature here.
"""

from __future__ import annotations

from kvindex.foundation.clock import Clock, SystemClock
from kvindex.registry import ReplicaRecord


class MemoryRegistry:
    """`Registry` as a dictionary with leases."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._records: dict[str, tuple[float, ReplicaRecord]] = {}

    async def publish(self, record: ReplicaRecord, *, lease_s: float) -> None:
        """Write or refresh a record; it disappears when not refreshed for `lease_s`."""
        self._records[record.id] = (self._clock.monotonic() + lease_s, record)

    async def withdraw(self, replica_id: str) -> None:
        """Remove a record at once."""
        self._records.pop(replica_id, None)

    async def records(self) -> list[ReplicaRecord]:
        """List the records whose lease has not lapsed."""
        now = self._clock.monotonic()
        self._records = {
            replica_id: entry for replica_id, entry in self._records.items() if entry[0] > now
        }
        return sorted((record for _, record in self._records.values()), key=lambda r: r.id)

    async def close(self) -> None:
        """Do nothing: there are no connections."""
