"""The gateway's way to the shared indexes: bounded in time, and absent rather than failing.

Whoever asks gets an answer or None; a store that is down costs one request a time-out and the
others nothing, because only `probe` tries it again. Releases that could not be delivered are kept
and delivered later, so that no reservation outlives an outage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from kvindex.foundation.errors import DependencyError
from kvindex.index import PrefixIndex, Reservation, TargetMatch, TargetState
from router.fleet.own_reservations import OwnReservations, ReservationKey

log = logging.getLogger("prefixfleet.router.index")

ResultT = TypeVar("ResultT")

_TIMEOUTS_TO_OPEN = 2
_PROBE_TIMEOUTS = 4


class Release(NamedTuple):
    """A reservation to be released, as the index of a pool knows it.

    Its pending blocks are withdrawn even when they were written: by now their events say so, and
    what was evicted or reset since must not be credited.
    """

    pool: str
    key: ReservationKey


class IndexAccess:
    """Indexes by pool behind one circuit: they live in one store, so they fail together.

    `on_latency` is told the seconds of every answered call. Owns the indexes it opens.
    """

    def __init__(
        self,
        open_index: Callable[[str], PrefixIndex],
        *,
        gateway: str,
        timeout_s: float,
        lease_s: float,
        on_latency: Callable[[str, float], None],
    ) -> None:
        self._open_index = open_index
        self._gateway = gateway
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._on_latency = on_latency
        self._indexes: dict[str, PrefixIndex] = {}
        self._undelivered: dict[Release, None] = {}
        self._own = OwnReservations()
        self._sent: set[ReservationKey] = set()  # Perhaps in the store, and not yet released.
        self._num_timeouts = 0
        self.down_reason: str | None = None

    @property
    def is_up(self) -> bool:
        """Whether the last contact with the store was good."""
        return self.down_reason is None

    async def match(self, pool: str, hashes: Sequence[bytes]) -> list[TargetMatch] | None:
        """Ask who holds what; None when the store is down or slow.

        The load in it is that of the other gateways: this one knows its own work better.
        """
        matches = await self._try("match", lambda: self._index(pool).match(hashes))
        return None if matches is None else self._own.without(matches)

    async def reserve(self, pool: str, reservation: Reservation) -> None:
        """Announce work to the other gateways, as far as the store can be reached."""
        if self.down_reason is not None:
            return
        self._sent.add((reservation.target, reservation.request_id, reservation.attempt))

        async def reserve() -> bool:
            await self._index(pool).reserve(reservation)
            return True

        if await self._try("reserve", reserve):
            self._own.reserved(reservation)

    async def release_prefill(self, pool: str, key: ReservationKey) -> None:
        """Announce that a prefill is over; what is lost here is made good by `release`."""

        async def release_prefill() -> bool:
            await self._index(pool).release_prefill(*key)
            return True

        if await self._try("release_prefill", release_prefill):
            self._own.prefill_released(key)

    async def release(self, release: Release) -> None:
        """Withdraw a reservation, now or when the store is back."""
        if release.key not in self._sent:
            return  # The store has never heard of it.
        self._undelivered[release] = None
        await self._try("release", lambda: self._deliver(release))

    async def states(self, pool: str) -> list[TargetState] | None:
        """List the live targets of a pool; None when the store is down or slow."""
        return await self._try("states", lambda: self._index(pool).states())

    async def probe(self, pools: Sequence[str]) -> None:
        """Renew this gateway's lease in every pool, which also finds out whether the store is up.

        To be called every second or so by one task; it alone closes the circuit. Without pools it
        learns nothing and changes nothing.
        """
        if not pools:
            return
        try:
            async with asyncio.timeout(self._timeout_s * _PROBE_TIMEOUTS):
                for pool in pools:
                    await self._index(pool).touch_gateway(self._gateway, lease_s=self._lease_s)
                self._recovered()
                for release in list(self._undelivered):
                    await self._deliver(release)
        except TimeoutError:
            self._failed(f"no answer within {self._timeout_s * _PROBE_TIMEOUTS:g} s")
        except DependencyError as error:
            self._failed(str(error))

    async def close(self) -> None:
        """Close every index."""
        for index in self._indexes.values():
            await index.close()
        self._indexes.clear()

    def _index(self, pool: str) -> PrefixIndex:
        index = self._indexes.get(pool)
        if index is None:
            index = self._indexes[pool] = self._open_index(pool)
        return index

    async def _deliver(self, release: Release) -> None:
        await self._index(release.pool).release(*release.key, written=False)
        self._own.released(release.key)
        self._sent.discard(release.key)
        self._undelivered.pop(release, None)

    async def _try(self, name: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT | None:
        if self.down_reason is not None:
            return None
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await call()
        except TimeoutError:
            self._num_timeouts += 1
            if self._num_timeouts >= _TIMEOUTS_TO_OPEN:
                self._failed(f"{name}: no answer within {self._timeout_s:g} s")
            return None
        except DependencyError as error:
            self._failed(str(error))
            return None
        self._num_timeouts = 0
        self._on_latency(name, time.perf_counter() - started)
        return result

    def _failed(self, reason: str) -> None:
        if self.down_reason is None:
            log.warning("index unreachable, serving on in FALLBACK reason=%r", reason)
        self.down_reason = reason

    def _recovered(self) -> None:
        if self.down_reason is not None:
            log.info("index reachable again")
        self.down_reason = None
        self._num_timeouts = 0
