"""A replay in virtual time: arrivals, placements, steps, failures, in one order of events.

Between two events that touch the router the replicas know nothing of each other, so each runs
ahead by itself. Nothing here decides where a request goes or what a step computes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvindex.foundation.clock import VirtualClock
from router.policy.planner import Outcome
from sim.config import ReplayConfig
from sim.fleet import RENEW_S, VirtualFleet
from sim.gateway import Gateway
from sim.latency import LatencyModel
from sim.limits import TenantLimits
from sim.outcomes import Answer, Outcomes, Refusal, TurnedAway
from sim.pacing import Due, make_pacing
from sim.placement import Attempt, Observer, Placed, Refused, Waiting
from sim.routing import RouterMaker, build_gateways, targets_of
from sim.virtual_replica import StepResult
from sim.workload import Arrival, Workload

_Action = Callable[[], None]


@dataclass(slots=True)
class _Sending:
    """A request from its arrival to its end, over all its attempts; instants are absolute."""

    gateway: Gateway
    attempt: Attempt
    sent_at: float
    num_hit_tokens: int = 0
    started_at: float | None = None
    first_token_at: float | None = None


@dataclass(slots=True)
class _Flight:
    """A request at a replica."""

    sending: _Sending
    placed: Placed
    position: int


class ClockedReplay:
    """One replay with a clock; `run` once."""

    def __init__(
        self,
        config: ReplayConfig,
        workload: Workload,
        latency: LatencyModel,
        *,
        observer: Observer | None = None,
        make_router: RouterMaker | None = None,
    ) -> None:
        self._config = config
        self._block_size = workload.block_size
        self._pacing = make_pacing(config, workload)
        self._clock = VirtualClock()
        self._max_model_len = config.blocks * workload.block_size
        self._gateways, self._feeds = build_gateways(
            config,
            clock=self._clock,
            block_size=workload.block_size,
            max_model_len=self._max_model_len,
            observer=observer,
            make_router=make_router,
        )
        self._fleet = VirtualFleet(
            config, block_size=workload.block_size, latency=latency, feeds=self._feeds
        )
        self._position = {target: i for i, target in enumerate(targets_of(config))}
        self._limits = TenantLimits(config)
        self._agenda: list[tuple[float, int, _Action]] = []
        self._num_planned = 0
        self._num_to_come = 0
        self._flights: dict[str, _Flight] = {}
        self._waiting: dict[str, _Sending] = {}
        self._next_look: dict[str, float] = {}
        self._outcomes = Outcomes()
        self._last_end_s = 0.0

    def run(self) -> Outcomes:
        """Play everything and let the fleet drain."""
        for due in self._pacing.first():
            self._expect(due)
        self._tick()
        for failure in self._config.failures:
            back_at_s = failure.at_s + failure.down_s
            self._at(failure.at_s, partial(self._fail, failure.replica))
            self._at(back_at_s, partial(self._restart, failure.replica))
        while self._agenda:
            self._advance(self._agenda[0][0])
            at_s, _, action = heapq.heappop(self._agenda)
            self._clock.advance(max(0.0, at_s - self._clock.monotonic()))
            action()
        left = len(self._flights) + len(self._waiting)
        assert not left, f"the fleet has drained and {left} requests are still on their way"
        return self._total()

    def _at(self, at_s: float, action: _Action) -> None:
        self._num_planned += 1
        heapq.heappush(self._agenda, (at_s, self._num_planned, action))

    def _expect(self, due: Due | None) -> None:
        if due is not None:
            self._num_to_come += 1
            self._at(due.at_s, partial(self._arrive, due.arrival))

    def _advance(self, until: float) -> None:
        """Let the replicas compute up to `until`, or up to an earlier event that this causes."""
        if self._config.mode == "open" and not self._waiting:
            for position, result in self._fleet.advance(until):
                self._take(position, result)
            return
        while True:
            until = min(until, self._agenda[0][0])
            step = self._fleet.next_step(until, one_by_one=bool(self._waiting))
            if step is None:
                return
            for position, result in self._fleet.advance_one(*step):
                self._take(position, result)

    def _tick(self) -> None:
        """Renew leases and gateways, as long as there is anything to come."""
        self._fleet.renew()
        for gateway in self._gateways:
            gateway.renew()
        if self._num_to_come or self._flights or self._waiting:
            self._at(self._clock.monotonic() + RENEW_S, self._tick)

    def _arrive(self, arrival: Arrival) -> None:
        self._num_to_come -= 1
        outcomes = self._outcomes
        outcomes.num_arrivals += 1
        outcomes.has_prefix &= arrival.has_prefix
        self._expect(self._pacing.sent())
        if arrival.num_tokens > self._max_model_len:
            self._refuse(arrival, "too_long")
            return
        if not self._limits.admit(arrival, self._clock.monotonic()):
            self._refuse(arrival, "limited")
            return
        gateway = self._gateways[arrival.number % len(self._gateways)]
        self._place(_Sending(gateway, Attempt(arrival), self._clock.monotonic()))

    def _place(self, sending: _Sending) -> None:
        """Send an attempt to a replica, or let it wait; a replica that is down fails it at once."""
        now = self._clock.monotonic()
        gateway, attempt = sending.gateway, sending.attempt
        self._fleet.deliver(now)
        placed = gateway.place(attempt, now)
        if isinstance(placed, Waiting):
            self._waiting[attempt.arrival.request_id] = sending
            self._look_again(gateway)
            return
        if isinstance(placed, Refused):
            self._settle_refused(sending, now)
            self._refuse(attempt.arrival, "shed" if placed.shed else "no_replica")
            return
        flight = _Flight(sending, placed, self._position[placed.target])
        replica = self._fleet.slots[flight.position].replica
        if replica is None:
            self._retry(flight)
            return
        self._flights[attempt.arrival.request_id] = flight
        replica.add(attempt.arrival, now, num_emitted=attempt.num_emitted)

    def _take_turns(self, gateway: Gateway) -> None:
        """Place whoever has the turn, as long as somebody has."""
        now = self._clock.monotonic()
        self._next_look.pop(gateway.name, None)
        while (request_id := gateway.router.next_turn(now)) is not None:
            self._place(self._waiting.pop(request_id))
        self._look_again(gateway)

    def _look_again(self, gateway: Gateway, at_s: float | None = None) -> None:
        """Plan to look for a turn at an instant, or when the router asks for it."""
        wanted = gateway.router.next_instant() if at_s is None else at_s
        known = self._next_look.get(gateway.name)
        if wanted is None or (known is not None and known <= wanted):
            return
        self._next_look[gateway.name] = wanted
        self._at(wanted, partial(self._take_turns, gateway))

    def _take(self, position: int, result: StepResult) -> None:
        """Note first tokens and ends among the outputs of a step."""
        replica = self._fleet.slots[position].replica
        assert replica is not None
        for output in result.outputs:
            if output.num_cached_tokens is None and output.finish_reason is None:
                continue
            flight = self._flights[output.request_id]
            sending = flight.sending
            if output.num_cached_tokens is not None:
                started_at = replica.started_at(output.request_id)
                sending.gateway.first_token(sending.attempt, flight.placed)
                if sending.first_token_at is None:
                    sending.started_at, sending.first_token_at = started_at, result.end_s
                    sending.num_hit_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                self._end(flight, "answered")
                self._answer(flight, result.end_s)
            if self._waiting:
                self._look_again(sending.gateway, result.end_s)

    def _end(self, flight: _Flight, outcome: Outcome) -> None:
        now, sending = self._clock.monotonic(), flight.sending
        sending.gateway.finish(sending.attempt, flight.placed, outcome, now)
        self._flights.pop(sending.attempt.arrival.request_id, None)

    def _answer(self, flight: _Flight, end_s: float) -> None:
        sending = flight.sending
        arrival = sending.attempt.arrival
        assert sending.started_at is not None
        assert sending.first_token_at is not None
        self._last_end_s = max(self._last_end_s, end_s)
        self._limits.settle_answer(arrival, num_cached_tokens=sending.num_hit_tokens, now=end_s)
        self._outcomes.answers.append(
            Answer(
                number=arrival.number,
                line=arrival.line,
                at_s=sending.sent_at,
                tenant=arrival.tenant,
                replica=flight.position,
                num_prompt_tokens=arrival.num_prompt_tokens,
                num_output_tokens=arrival.num_output_tokens,
                num_blocks=len(arrival.hashes),
                num_hit_blocks=sending.num_hit_tokens // self._block_size,
                num_hit_tokens=sending.num_hit_tokens,
                num_predicted_tokens=flight.placed.num_predicted_tokens,
                num_attempts=sending.attempt.number,
                queue_s=sending.started_at - sending.sent_at,
                prefill_s=sending.first_token_at - sending.started_at,
                total_s=end_s - sending.sent_at,
            )
        )
        self._expect(self._pacing.ended(arrival, end_s))

    def _settle_refused(self, sending: _Sending, now: float) -> None:
        """Charge what had run of a request that nobody goes on with."""
        attempt = sending.attempt
        if sending.first_token_at is None:
            self._limits.withdraw(attempt.arrival, now)
            return
        self._limits.settle(
            attempt.arrival,
            num_cached_tokens=sending.num_hit_tokens,
            num_output_tokens=attempt.num_emitted,
            now=now,
        )

    def _refuse(self, arrival: Arrival, why: Refusal) -> None:
        now = self._clock.monotonic()
        self._outcomes.refused.append(
            TurnedAway(
                number=arrival.number, line=arrival.line, at_s=now, tenant=arrival.tenant, why=why
            )
        )
        self._expect(self._pacing.ended(arrival, now))

    def _fail(self, position: int) -> None:
        """Kill a replica; its requests go on elsewhere, from the tokens they have."""
        replica = self._fleet.stop(position)
        if replica is None:
            return
        here = [flight for flight in self._flights.values() if flight.position == position]
        for flight in here:
            self._retry(flight, num_emitted=replica.num_emitted(flight.sending.attempt.arrival))

    def _retry(self, flight: _Flight, *, num_emitted: int | None = None) -> None:
        """Send a failed attempt elsewhere; `num_emitted` as before unless it has got further."""
        self._end(flight, "failed")
        self._outcomes.num_retries += 1
        sending = flight.sending
        attempt = sending.attempt
        sending.attempt = Attempt(
            attempt.arrival,
            attempt.number + 1,
            attempt.tried | {flight.placed.target.replica},
            attempt.num_emitted if num_emitted is None else num_emitted,
        )
        self._place(sending)

    def _restart(self, position: int) -> None:
        self._fleet.start(position, self._clock.monotonic())
        for gateway in self._gateways:
            gateway.router.forget(self._fleet.slots[position].target.replica)

    def _total(self) -> Outcomes:
        outcomes, fleet = self._outcomes, self._fleet
        fleet.close()
        outcomes.num_evictions = fleet.num_evictions
        outcomes.num_preemptions = fleet.num_preemptions
        outcomes.num_gaps = sum(feed.view.num_gaps for feed in self._feeds)
        outcomes.count_cached(fleet.cached())
        outcomes.duration_s = self._last_end_s
        return outcomes
