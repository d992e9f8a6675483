"""`order` mode: requests one after the other, no clock, each computed at once.

The fastest answer to "what hit rate?". Load exists only as a count: a request is running at its
replica until so many others were placed.
"""

from __future__ import annotations

from collections import deque

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
from sim.placement import Attempt, Observer, Placed, Waiting
from sim.router_view import FOREVER_S
from sim.routing import build_gateways, targets_of
from sim.workload import Workload


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
        self._max_running = config.in_flight or config.replicas
        self._outcomes = Outcomes()

    def run(self) -> Outcomes:
        """Place and compute every request."""
        outcomes = self._outcomes
        for arrival in self._workload:
            outcomes.num_arrivals += 1
            outcomes.has_prefix &= arrival.has_prefix
            gateway = self._gateways[arrival.number % len(self._gateways)]
            self._serve(gateway, Attempt(arrival))
        outcomes.num_evictions = sum(r.pool.num_evictions for r in self._replicas)
        outcomes.num_gaps = sum(feed.view.num_gaps for feed in self._feeds)
        outcomes.count_cached([set(replica.pool.cached_hashes()) for replica in self._replicas])
        return outcomes

    def _serve(self, gateway: Gateway, attempt: Attempt) -> None:
        arrival = attempt.arrival
        placed = gateway.place(attempt, 0.0)
        assert not isinstance(placed, Waiting), "a queue needs a clock"
        if not isinstance(placed, Placed):
            self._outcomes.refused.append(
                TurnedAway(
                    number=arrival.number,
                    line=arrival.line,
                    at_s=arrival.at_s,
                    tenant=arrival.tenant,
                    why="shed" if placed.shed else "no_replica",
                )
            )
            return
        position = self._position[placed.target]
        replica = self._replicas[position]
        num_hits = replica.serve(arrival.hashes, num_prompt_tokens=arrival.num_prompt_tokens)
        self._publish(position, replica)
        self._outcomes.answers.append(
            Answer(
                number=arrival.number,
                line=arrival.line,
                at_s=arrival.at_s,
                tenant=arrival.tenant,
                replica=position,
                num_prompt_tokens=arrival.num_prompt_tokens,
                num_output_tokens=arrival.num_output_tokens,
                num_blocks=len(arrival.hashes),
                num_hit_blocks=num_hits,
                num_hit_tokens=num_hits * self._block_size,
                num_predicted_tokens=placed.num_predicted_tokens,
            )
        )
        self._running.append((gateway, attempt, placed))
        if len(self._running) > self._max_running:
            oldest_gateway, oldest, place = self._running.popleft()
            oldest_gateway.first_token(oldest, place)
            oldest_gateway.finish(oldest, place, "answered", 0.0)

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
