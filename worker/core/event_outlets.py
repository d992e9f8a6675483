"""Where the KV events of an engine core go: to our own ingesters, and to routers of other make.

Ours get hashes alone, under a topic that names replica and boot; the others get what vLLM tells,
token ids and cache salts included, and only if the replica was asked to. Each stream has numbers
and a replay of its own. It knows no blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.block_contents import BlockContents
from engine.core import EngineCore
from engine.messages import EventPlaces
from kvindex.events import EventBatch, KVEvent
from kvindex.publisher import EventPublisher
from kvindex.topic import KvTopic
from worker.core.spec import CoreSpec


class EventOutlets:
    """The publishers of one core; raises DependencyError when an endpoint cannot be bound."""

    def __init__(self, spec: CoreSpec, core: EngineCore, *, boot_ns: int) -> None:
        self._dp_rank = spec.dp_rank
        self._fleet: EventPublisher | None = None
        self._others: EventPublisher | None = None
        self._contents: BlockContents | None = None
        if spec.publish_events:
            self._fleet = EventPublisher(
                str(KvTopic(spec.replica_id, boot_ns)),
                endpoint=spec.events_endpoint,
                replay_endpoint=spec.replay_endpoint,
            )
        if spec.announce is not None:
            self._contents = core.kv_cache.keep_contents()
            self._others = EventPublisher(
                spec.announce.topic,
                endpoint=spec.announce.endpoint,
                replay_endpoint=spec.announce.replay_endpoint,
            )

    @property
    def events(self) -> EventPlaces | None:
        """Where our own ingesters listen; None: nothing is told to them."""
        return _places(self._fleet)

    @property
    def announced(self) -> EventPlaces | None:
        """Where others listen; None: nothing is told to them."""
        return _places(self._others)

    @property
    def last_seq(self) -> int:
        """The last number that our ingesters were given, -1 before the first."""
        last = self._fleet.last_seq if self._fleet else None
        return -1 if last is None else last

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish what changed, in order; never blocks."""
        if not events:
            return
        if self._fleet is not None:
            self._fleet.publish(EventBatch(time.time(), list(events), self._dp_rank))
        if self._others is not None and self._contents is not None:
            told = self._contents.told(events)
            self._others.publish(EventBatch(time.time(), told, self._dp_rank))

    def close(self) -> None:
        """Send what is queued and close the sockets; may be called twice."""
        for publisher in (self._fleet, self._others):
            if publisher is not None:
                publisher.close()


def _places(publisher: EventPublisher | None) -> EventPlaces | None:
    if publisher is None:
        return None
    return EventPlaces(publisher.endpoint, publisher.replay_endpoint)
