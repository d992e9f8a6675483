"""`order` mode: requests one after the other, no clock, each computed at once.

The fastest answer to "what hit rate?". Load exists only as a count: a request is running at its
replica until so many others were placed.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import ConfigError
from kvindex.index import LoadReport
from router.config import Limits
from sim.cache_replica import CacheReplica
from sim.config import ReplayConfig
from sim.event_feed import EventStream, Inventory
from sim.gateway import Gateway
from sim.latency import LatencyModel
from sim.outcomes import Answer, Outcomes, TurnedAway
from sim.placement import Attempt, Observer, Placed, Refused, Waiting
from sim.router_view import FOREVER_S
from sim.routing import build_gateways, targets_of
from sim.workload import Arrival, Workload

BATCH = 256
"""Requests that are read, served and noted together: what runs on and on is much faster."""


class _Served(msgspec.Struct, frozen=True, gc=False):
    """Where a request went, and how much of it was there."""

    arrival: Arrival
    position: int
    num_hits: int
    num_predicted_tokens: int


class OrderOnly:
    """One replay without a clock; `run` once."""

    def __init__(
        self,
        config: ReplayConfig,
        workload: Workload,
        latency: LatencyModel,
        *,
        observer: Observer | None = None,
    ) -> None:
        """Build fleet and gateways; raise ConfigError for settings that need a clock."""
        _refuse_timed_settings(config)
        self._workload = workload
        self._block_size = workload.block_size
        self._replicas = [
            CacheReplica(num_blocks=config.blocks, block_size=self._block_size)
            for _ in range(config.replicas)
        ]
        self._targets = targets_of(config)
        self._position = {target: i for i, target in enumerate(self._targets)}
        self._streams = [EventStream() for _ in self._targets]
        self._inventories = {
            target: Inventory(stream, replica.pool)
            for target, stream, replica in zip(
                self._targets, self._streams, self._replicas, strict=True
            )
        }
        self._gateways, self._feeds = build_gateways(
            config,
            clock=VirtualClock(),
            block_size=self._block_size,
            max_model_len=None,
            observer=observer,
        )
        report = LoadReport(
            mode="EXACT",
            prefill_tokens_per_s=latency.prefill_tokens_per_s,
        )
        for feed in self._feeds:
            for target in self._targets:
                feed.view.register(target, report, lease_s=FOREVER_S)
        self._running: deque[tuple[Gateway, Attempt, Placed]] = deque()
        self._served: list[_Served] = []
        self._max_running = config.in_flight or config.replicas
        self._outcomes = Outcomes()

    def run(self) -> Outcomes:
        """Place and compute every request."""
        outcomes, arrivals = self._outcomes, iter(self._workload)
        while batch := list(islice(arrivals, BATCH)):
            outcomes.num_arrivals += len(batch)
            outcomes.has_prefix &= all([arrival.has_prefix for arrival in batch])
            for arrival in batch:
                self._serve(arrival)
            outcomes.answers += map(self._answer, self._served)
            self._served.clear()
        outcomes.num_evictions = sum(r.pool.num_evictions for r in self._replicas)
        outcomes.num_gaps = sum(feed.view.num_gaps for feed in self._feeds)
        outcomes.count_cached([set(replica.pool.cached_hashes()) for replica in self._replicas])
        return outcomes

    def _serve(self, arrival: Arrival) -> None:
        gateway = self._gateways[arrival.number % len(self._gateways)]
        attempt = Attempt(arrival)
        placed = gateway.place(attempt, 0.0)
        if not isinstance(placed, Placed):
            self._turn_away(arrival, placed)
            return
        position = self._position[placed.target]
        replica = self._replicas[position]
        num_hits = replica.serve(arrival.hashes, num_prompt_tokens=arrival.num_prompt_tokens)
        self._publish(position, replica)
        self._served.append(_Served(arrival, position, num_hits, placed.num_predicted_tokens))
        self._running.append((gateway, attempt, placed))
        if len(self._running) > self._max_running:
            oldest_gateway, oldest, place = self._running.popleft()
            oldest_gateway.first_token(oldest, place)
            oldest_gateway.finish(oldest, place, "answered", 0.0)

    def _turn_away(self, arrival: Arrival, choice: Refused | Waiting) -> None:
        assert not isinstance(choice, Waiting), "a queue needs a clock"
        self._outcomes.refused.append(
            TurnedAway(
                number=arrival.number,
                line=arrival.line,
                at_s=arrival.at_s,
                tenant=arrival.tenant,
                why="shed" if choice.shed else "no_replica",
            )
        )

    def _answer(self, served: _Served) -> Answer:
        arrival = served.arrival
        return Answer(
            number=arrival.number,
            line=arrival.line,
            at_s=arrival.at_s,
            tenant=arrival.tenant,
            replica=served.position,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=arrival.num_output_tokens,
            num_blocks=len(arrival.hashes),
            num_hit_blocks=served.num_hits,
            num_hit_tokens=served.num_hits * self._block_size,
            num_predicted_tokens=served.num_predicted_tokens,
        )

    def _publish(self, position: int, replica: CacheReplica) -> None:
        events = replica.take_events()
        if not events or not self._feeds:
            return
        batch = self._streams[position].batch(events, 0.0)
        for feed in self._feeds:
            feed.publish(self._targets[position], batch, 0.0)
            feed.deliver(0.0, self._inventories)


def _refuse_timed_settings(config: ReplayConfig) -> None:
    view = config.view
    for name, is_set in (
        ("--view-delay", view.delay_s > 0),
        ("--fail", bool(config.failures)),
        ("--jitter", config.jitter),
        ("a fair queue (--accept-s, --guards gateway)", config.planner.queue is not None),
        ("a limit of a tenant", any(t.limits != Limits() for t in config.tenants.values())),
    ):
        if is_set:
            raise ConfigError(f"{name} needs a clock: give --mode open, closed or fixed")
