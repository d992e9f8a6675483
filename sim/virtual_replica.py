"""A replica in virtual time: the real engine core, the latency model, and a clock of its own.

It runs when it is told up to when, and says what has ended by then. It knows no router and no
other replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import EngineOutput
from engine.request import Request
from kvindex.events import KVEvent
from kvindex.foundation.clock import VirtualClock
from kvindex.index import LoadReport
from sim.fast_forward import fast_forward
from sim.latency import LatencyModel
from sim.sized_request import make_request
from sim.virtual_executor import VirtualExecutor
from sim.workload import Arrival


@dataclass(slots=True)
class StepResult:
    """What a step changed, visible from `end_s` on."""

    end_s: float
    outputs: list[EngineOutput]
    events: list[KVEvent]


class VirtualReplica:
    """One engine of `num_blocks` usable blocks; `fast` lets it take decode steps in one go."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        engine: EngineConfig,
        latency: LatencyModel,
        now: float = 0.0,
        fast: bool = True,
    ) -> None:
        self._clock = VirtualClock(now)
        self._latency = latency
        self._fast = fast
        self._executor = VirtualExecutor(
            num_blocks=num_blocks + 1, latency=latency, clock=self._clock
        )
        config = msgspec.structs.replace(engine, block_size=block_size, async_depth=0)
        self.core = EngineCore(config, self._executor, self._clock)
        self._executor.requests = self.core.scheduler.requests
        self._unseen: StepResult | None = None
        self._num_added = 0

    @property
    def next_at(self) -> float | None:
        """When the step that is being computed ends, or the next one begins; None when idle."""
        if self._unseen is not None:
            return self._unseen.end_s
        return self._clock.monotonic() if self.core.has_work else None

    @property
    def has_result(self) -> bool:
        """Whether a step was computed whose end has not been reached."""
        return self._unseen is not None

    @property
    def no_end_before(self) -> float:
        """A time before which no request ends here; infinite when idle. O(live requests)."""
        if self._unseen is not None and any(o.finish_reason for o in self._unseen.outputs):
            return self._unseen.end_s
        live = self.core.scheduler.requests.values()
        fewest = min((_num_tokens_left(request) for request in live), default=None)
        if fewest is None:
            return math.inf
        return self._clock.monotonic() + fewest * self._latency.base_s

    def num_emitted(self, arrival: Arrival) -> int:
        """Return how many tokens of an unfinished request have been seen outside."""
        request_id = arrival.request_id
        request = self.core.scheduler.requests.get(request_id)
        computed = arrival.num_output_tokens if request is None else request.num_output_tokens
        unseen = self._unseen.outputs if self._unseen is not None else []
        return computed - sum(len(o.token_ids) for o in unseen if o.request_id == request_id)

    def add(self, arrival: Arrival, at_s: float, *, num_emitted: int = 0) -> None:
        """Queue a request; it joins the first step that begins at or after `at_s`."""
        if self.next_at is None:
            self._clock.advance(max(0.0, at_s - self._clock.monotonic()))
        self._num_added += 1
        scheme = self.core.config.hash_scheme
        request = make_request(arrival, scheme, order=self._num_added, num_emitted=num_emitted)
        self.core.scheduler.add(request)

    def started_at(self, request_id: str) -> float:
        """Return, once, when the first step began that computed a request."""
        return self._executor.started_at.pop(request_id)

    def advance(self, until: float) -> Iterator[StepResult]:
        """Compute until `until`; yield what ends by then, in order of time."""
        while True:
            if self._unseen is not None:
                if self._unseen.end_s > until:
                    return
                result, self._unseen = self._unseen, None
                yield result
            if not self.core.has_work:
                return
            if self._clock.monotonic() >= until:
                return
            if self._fast:
                for change in fast_forward(self.core, self._clock, self._latency, until=until):
                    yield StepResult(change.end_s, [], change.events)
                if self._clock.monotonic() >= until:
                    return
            self._unseen = self._step()

    def _step(self) -> StepResult:
        outputs = self.core.step()
        return StepResult(self._clock.monotonic(), outputs, self.core.take_events())

    def report(self) -> LoadReport:
        """Say how the engine does, as a replica does with every lease renewal."""
        stats = self.core.stats()
        return LoadReport(
            mode="EXACT",
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens,
            kv_usage=1 - stats.num_free_blocks / stats.num_blocks,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_tokens_per_s=stats.decode_tokens_per_s,
        )


def _num_tokens_left(request: Request) -> int:
    """Return how many tokens a request is yet to sample, one of them per step."""
    limit = request.source.sampling.max_tokens
    assert limit is not None, "a trace says how long every answer is"
    return limit - request.num_output_tokens
