"""The replicas of a clocked replay: who lives, what their events say, and who hears of it.

It moves replicas on in virtual time and carries their events into the indexes. Who gets which
request is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvindex.index import LoadReport, Target
from sim.config import ReplayConfig
from sim.event_feed import EventFeed, EventStream, Inventory
from sim.latency import LatencyModel
from sim.routing import targets_of
from sim.virtual_replica import StepResult, VirtualReplica

LEASE_S = 10.0
RENEW_S = 2.0


@dataclass(slots=True)
class Slot:
    """A place in the fleet; `replica` is None while it is down."""

    target: Target
    replica: VirtualReplica | None
    stream: EventStream


class VirtualFleet:
    """All replicas, registered in every index from the start."""

    def __init__(
        self,
        config: ReplayConfig,
        *,
        block_size: int,
        latency: LatencyModel,
        feeds: Sequence[EventFeed],
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._latency = latency
        self._feeds = feeds
        self._inventories: dict[Target, Inventory] = {}
        self.num_evictions = 0
        self.num_preemptions = 0
        self.slots = [Slot(target, None, EventStream()) for target in targets_of(config)]
        for position in range(len(self.slots)):
            self.start(position, 0.0)

    def start(self, position: int, now: float) -> None:
        """Start an empty replica and open a new epoch for it."""
        slot = self.slots[position]
        slot.replica = VirtualReplica(
            num_blocks=self._config.blocks,
            block_size=self._block_size,
            engine=self._config.engine,
            latency=self._latency,
            now=now,
            fast=not self._config.step_by_step,
        )
        slot.stream = EventStream()
        self._inventories[slot.target] = Inventory(slot.stream, slot.replica.core.kv_cache.pool)
        for feed in self._feeds:
            feed.forget(slot.target)
            feed.view.register(slot.target, LoadReport(mode="EXACT"), lease_s=LEASE_S)

    def stop(self, position: int) -> VirtualReplica | None:
        """Take a replica away, as a kill does; its lease goes on until it lapses."""
        slot = self.slots[position]
        replica, slot.replica = slot.replica, None
        if replica is not None:
            self._count(replica)
        return replica

    def renew(self) -> None:
        """Renew every live replica's lease, with its load."""
        for slot in self.slots:
            if slot.replica is not None:
                report = slot.replica.report()
                for feed in self._feeds:
                    feed.view.renew(slot.target, report, lease_s=LEASE_S)

    def advance(self, until: float) -> Iterator[tuple[int, StepResult]]:
        """Run every replica up to `until`; yield what ends by then, replica by replica."""
        for position in range(len(self.slots)):
            yield from self.advance_one(position, until)

    def advance_one(self, position: int, until: float) -> Iterator[tuple[int, StepResult]]:
        """Run one replica up to `until`; yield what ends by then, in order of time."""
        slot = self.slots[position]
        if slot.replica is None:
            return
        for result in slot.replica.advance(until):
            if result.events:
                batch = slot.stream.batch(result.events, result.end_s)
                for feed in self._feeds:
                    feed.publish(slot.target, batch, result.end_s)
            if result.outputs:
                yield position, result

    def next_step(self, until: float, *, one_by_one: bool) -> tuple[int, float] | None:
        """Return which replica is to go on next, and up to when; None when all have reached it.

        For traffic in which an answer causes the next request: nothing is computed beyond a time
        at which another replica may end a request; with `one_by_one`, beyond one step.
        """
        waiting = [
            (slot.replica.next_at, position, slot.replica)
            for position, slot in enumerate(self.slots)
            if slot.replica is not None and slot.replica.next_at is not None
        ]
        if not waiting:
            return None
        at_s, position, replica = min(waiting, key=lambda entry: entry[:2])
        if at_s > until or (at_s == until and not replica.has_result):
            return None
        others = (other.no_end_before for _, i, other in waiting if i != position)
        limit = min(until, min(others, default=math.inf))
        if limit > at_s and not one_by_one:
            return position, limit
        return position, at_s if replica.has_result else math.nextafter(at_s, math.inf)

    def deliver(self, now: float) -> None:
        """Bring the events that have arrived by `now` into the indexes."""
        for feed in self._feeds:
            feed.deliver(now, self._inventories)

    def close(self) -> None:
        """Add up what the engines counted."""
        for slot in self.slots:
            if slot.replica is not None:
                self._count(slot.replica)

    def cached(self) -> list[set[bytes]]:
        """Return what each live replica holds."""
        return [
            set(slot.replica.core.kv_cache.pool.cached_hashes())
            for slot in self.slots
            if slot.replica is not None
        ]

    def _count(self, replica: VirtualReplica) -> None:
        self.num_evictions += replica.core.kv_cache.pool.num_evictions
        self.num_preemptions += replica.core.counters.preemptions
