"""Ends attempts whose replica has left the fleet and says nothing more.

A process that hangs, or a machine that is gone, closes no connection: its lapsed lease tells. One
that still sends is left alone, whatever the registry says.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from router.fleet.replica import Replica


class Watched(Protocol):
    """A stream that counts what has come."""

    num_pieces: int


class SilenceWatch:
    """The time limits of running streams, by the replica object that serves them.

    `has_gone` says whether a replica is out of the fleet now. `grace_s` after it was first seen to
    be, limits of its streams run out where nothing has come since, unless the client is waited for.
    """

    def __init__(self, has_gone: Callable[[Replica], bool], *, grace_s: float) -> None:
        self.has_gone = has_gone
        self._grace_s = grace_s
        self._streams: dict[int, dict[asyncio.Timeout, Watched]] = defaultdict(dict)
        self._replicas: dict[int, Replica] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    @contextmanager
    def watching(self, replica: Replica, limit: asyncio.Timeout, stream: Watched) -> Iterator[None]:
        """Watch a stream for as long as it is relayed."""
        key = id(replica)
        self._replicas[key] = replica
        self._streams[key][limit] = stream
        try:
            yield
        finally:
            del self._streams[key][limit]
            if not self._streams[key]:
                del self._streams[key], self._replicas[key]

    def look(self) -> None:
        """Start the grace of replicas that have gone; to be called after each look at the fleet."""
        loop = asyncio.get_running_loop()
        for key, replica in self._replicas.items():
            if key not in self._timers and self.has_gone(replica):
                before = {limit: stream.num_pieces for limit, stream in self._streams[key].items()}
                self._timers[key] = loop.call_later(self._grace_s, self._cut, key, before)

    def _cut(self, key: int, before: dict[asyncio.Timeout, int]) -> None:
        del self._timers[key]
        replica = self._replicas.get(key)
        if replica is None or not self.has_gone(replica):
            return
        now = asyncio.get_running_loop().time()
        for limit, stream in self._streams[key].items():
            is_silent = before.get(limit) == stream.num_pieces and limit.when() is not None
            if is_silent and not limit.expired():
                limit.reschedule(now)

    def close(self) -> None:
        """Forget all graces."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
