"""The gateway's way to the shared indexes: bounded in time, and absent rather than failing.

Whoever asks gets an answer or None; a store that is down costs one request a time-out and the
others nothing, because only `probe` tries it again. What nobody waits for is told in one call at a
time: what comes meanwhile goes together with the next. Releases that could not be delivered are
kept and delivered later, so that no reservation outlives an outage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from kvindex.foundation.errors import DependencyError
from kvindex.index import (
    Announcement,
    PrefillEnd,
    PrefixIndex,
    Release,
    Reservation,
    TargetMatch,
    TargetState,
)
from router.fleet.own_reservations import OwnReservations, ReservationKey

log = logging.getLogger("prefixfleet.router.index")

ResultT = TypeVar("ResultT")

_TIMEOUTS_TO_OPEN = 2
_PROBE_TIMEOUTS = 4


class IndexAccess:
    """Indexes by pool behind one circuit: they live in one store, so they fail together.

    `on_latency` is told the seconds of every answered call, `spawn` runs what must outlive the
    request that caused it. Owns the indexes it opens.
    """

    def __init__(
        self,
        open_index: Callable[[str], PrefixIndex],
        *,
        gateway: str,
        timeout_s: float,
        lease_s: float,
        on_latency: Callable[[str, float], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._open_index = open_index
        self._gateway = gateway
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._on_latency = on_latency
        self._spawn = spawn
        self._indexes: dict[str, PrefixIndex] = {}
        self._untold: defaultdict[str, list[Announcement]] = defaultdict(list)
        self._is_telling = False
        self._undelivered: dict[ReservationKey, str] = {}
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

    def reserve(self, pool: str, reservation: Reservation) -> None:
        """Announce work to the other gateways, as far as the store can be reached."""
        if self.down_reason is None:
            self._sent.add((reservation.target, reservation.request_id, reservation.attempt))
            self._tell(pool, reservation)

    def release_prefill(self, pool: str, key: ReservationKey) -> None:
        """Announce that a prefill is over; what is lost here is made good by `release`."""
        if key in self._sent:
            self._tell(pool, PrefillEnd(*key))

    def release(self, pool: str, key: ReservationKey) -> None:
        """Withdraw a reservation that the store may have heard of, now or when it is back.

        Its pending blocks are withdrawn even when they were written: by now their events say so,
        and what was evicted or reset since must not be credited.
        """
        if key in self._sent:
            self._tell(pool, Release(*key, written=False))

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
                for key, pool in list(self._undelivered.items()):
                    await self._announce(pool, [Release(*key, written=False)])
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

    def _tell(self, pool: str, announcement: Announcement) -> None:
        """Tell something with the next call, which begins when the one before has been answered."""
        self._untold[pool].append(announcement)
        if not self._is_telling:
            self._is_telling = True
            self._spawn(self._tell_all())

    async def _tell_all(self) -> None:
        """Tell what is untold, in order: a release after its reservation, even if that was slow."""
        try:
            while self._untold:
                pool, together = self._untold.popitem()
                for one in together:
                    if isinstance(one, Release):
                        self._undelivered[_key_of(one)] = pool
                await self._try("announce", partial(self._announce, pool, together))
        finally:
            self._is_telling = False

    async def _announce(self, pool: str, announcements: Sequence[Announcement]) -> None:
        """Tell the store, and note what it has confirmed."""
        await self._index(pool).announce(announcements)
        for one in announcements:
            if isinstance(one, Reservation):
                self._own.reserved(one)
            elif isinstance(one, PrefillEnd):
                self._own.prefill_released(_key_of(one))
            else:
                key = _key_of(one)
                self._own.released(key)
                self._sent.discard(key)
                self._undelivered.pop(key, None)

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


def _key_of(announcement: PrefillEnd | Release) -> ReservationKey:
    return announcement.target, announcement.request_id, announcement.attempt
