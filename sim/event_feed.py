"""The way of KV events from the replicas to one index: late, lossy or neither; and its repair.

It holds what is on the way. Time is what it is told.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from kvindex.event_stream import index_ops
from kvindex.events import EventBatch, KVEvent
from kvindex.index import SequencedOps, Target
from sim.router_view import IndexView


class EventStream:
    """Numbers the event batches of one replica's life, as its publisher does."""

    def __init__(self) -> None:
        self._next_seq = 0

    @property
    def last_seq(self) -> int:
        """The newest batch, -1 before the first."""
        return self._next_seq - 1

    def batch(self, events: list[KVEvent], at_s: float) -> SequencedOps:
        """Return the operations of what one step changed, under the next number."""
        batch = SequencedOps(self._next_seq, index_ops(EventBatch(at_s, events)))
        self._next_seq += 1
        return batch


@dataclass(slots=True, frozen=True)
class Inventory:
    """What a replica answers when it is asked for a snapshot: its pool, and how far it came."""

    stream: EventStream
    pool: BlockPool


@dataclass(slots=True)
class EventFeed:
    """Events of every replica into `view`, `delay_s` late, each batch lost with `loss`."""

    view: IndexView
    delay_s: float
    loss: float
    source: random.Random
    _on_the_way: deque[tuple[float, Target, SequencedOps]] = field(default_factory=deque)

    def publish(self, target: Target, batch: SequencedOps, at_s: float) -> None:
        """Send a batch on its way, or lose it."""
        if self.loss and self.source.random() < self.loss:
            return
        self._on_the_way.append((at_s + self.delay_s, target, batch))

    def deliver(self, now: float, inventories: dict[Target, Inventory]) -> None:
        """Apply what has arrived by `now`; where a batch is missing, take a snapshot instead."""
        waiting = self._on_the_way
        if self.delay_s:
            due = [entry for entry in waiting if entry[0] <= now]
            self._on_the_way = deque(entry for entry in waiting if entry[0] > now)
        else:
            due = list(waiting)
            waiting.clear()
        for _, target, batch in due:
            if not self.view.apply(target, batch):
                inventory = inventories[target]
                self.view.load_snapshot(
                    target, inventory.stream.last_seq, inventory.pool.cached_hashes()
                )

    def forget(self, target: Target) -> None:
        """Drop what a dead replica had sent."""
        self._on_the_way = deque(entry for entry in self._on_the_way if entry[1] != target)
