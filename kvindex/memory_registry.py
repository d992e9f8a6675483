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
        self._claims: dict[str, tuple[float, str]] = {}

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

    async def claim(self, name: str, owner: str, *, lease_s: float) -> bool:
        """Take a task that only one process may do, or keep it; False while another has it."""
        now = self._clock.monotonic()
        lapses_at, holder = self._claims.get(name, (now, owner))
        if holder != owner and lapses_at > now:
            return False
        self._claims[name] = (now + lease_s, owner)
        return True

    async def unclaim(self, name: str, owner: str) -> None:
        """Give a task back; what another has stays with it."""
        if name in self._claims and self._claims[name][1] == owner:
            del self._claims[name]

    async def close(self) -> None:
        """Do nothing: there are no connections."""
