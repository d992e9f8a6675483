"""The two kinds of routers of a replay: our planner, and policies of other systems.

Our policies go through the real planner with all its guards. Baselines choose for themselves and
have no guards: they place until nothing is left to place on. Neither knows engines or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvindex.index import Target
from router.policy.planner import Outcome, Planner
from router.policy.types import Place, PlanRequest, Policy, Shed, TargetView, Wait
from sim.baselines.types import Baseline, Query, Worker
from sim.placement import Attempt, Choice, Placed, Refused, Waiting
from sim.workload import Arrival

MODEL = "model"


@dataclass(slots=True)
class PlannedRouter:
    """The real planner."""

    planner: Planner

    def choose(
        self, attempt: Attempt, views: Sequence[TargetView], block_size: int, now: float
    ) -> Choice:
        arrival = attempt.arrival
        request = PlanRequest(
            request_id=arrival.request_id,
            tenant=arrival.tenant,
            model=MODEL,
            num_prompt_tokens=arrival.num_prompt_tokens + attempt.num_emitted,
            num_total_tokens=arrival.num_tokens,
            block_size=block_size if arrival.has_prefix else None,
            hashes=arrival.hashes,
            attempt=attempt.number,
            tried=attempt.tried,
            session=arrival.session,
            priority=arrival.priority,
            weight=arrival.weight,
        )
        decision = self.planner.plan(request, views, now)
        if not isinstance(decision, Place):
            if isinstance(decision, Wait):
                return Waiting(decision)
            return Refused(isinstance(decision, Shed), decision)
        winner = decision.winner
        return Placed(
            target=winner.target,
            num_predicted_tokens=winner.num_cached_tokens,
            num_uncached_tokens=winner.num_uncached_tokens,
            num_matched_blocks=winner.num_cached_tokens // block_size,
            expected_s=winner.expected_s,
            decision=decision,
        )

    def first_token(self, attempt: Attempt) -> None:
        self.planner.first_token(attempt.arrival.request_id, attempt.number)

    def finish(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        arrival = attempt.arrival
        self.planner.finish(
            arrival.request_id,
            attempt.number,
            outcome,
            now,
            num_output_tokens=arrival.num_output_tokens if outcome == "answered" else 0,
        )

    def own_work(self, target: Target) -> tuple[int, int]:
        account = self.planner.ledger.account(target)
        return account.prefill_tokens, account.num_active

    def next_turn(self, now: float) -> str | None:
        return self.planner.next_turn(MODEL, now)

    def next_instant(self) -> float | None:
        return self.planner.next_instant(MODEL)

    def forget(self, replica: str) -> None:
        self.planner.forget([replica])
        self.planner.look_again()


@dataclass(slots=True)
class BaselineRouter:
    """A baseline and the count of its own running requests."""

    baseline: Baseline
    active: Counter[Target] = field(default_factory=Counter)
    running: dict[tuple[str, int], Target] = field(default_factory=dict)

    def choose(
        self, attempt: Attempt, views: Sequence[TargetView], block_size: int, now: float
    ) -> Choice:
        arrival = attempt.arrival
        open_ones = [view for view in views if view.target.replica not in attempt.tried]
        if not open_ones:
            return Refused(shed=False, decision=None)
        workers = [
            Worker(
                view.target.replica,
                self.active[view.target],
                view.matched_blocks,
            )
            for view in open_ones
        ]
        view = open_ones[self.baseline.choose(_query(arrival, block_size), workers)]
        usable = (arrival.num_prompt_tokens - 1) // block_size
        matched = min(view.matched_blocks, usable)
        num_cached = matched * block_size
        num_uncached = arrival.num_prompt_tokens - num_cached
        self.active[view.target] += 1
        self.running[arrival.request_id, attempt.number] = view.target
        return Placed(view.target, num_cached, num_uncached, matched, 0.0, None)

    def first_token(self, attempt: Attempt) -> None:
        """Nothing: baselines count requests, not tokens."""

    def finish(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        self.active[self.running.pop((attempt.arrival.request_id, attempt.number))] -= 1

    def own_work(self, target: Target) -> tuple[int, int]:
        return 0, self.active[target]

    def next_turn(self, now: float) -> str | None:
        """Nobody ever waits."""
        return None

    def next_instant(self) -> float | None:
        """Nobody ever waits."""
        return None

    def forget(self, replica: str) -> None:
        """Nothing: a baseline keeps no breakers, and its tree is its own mistake."""


class PolicyTable(dict[str, Policy]):
    """Policy by tenant; a tenant without one of its own has the replay's."""

    def __init__(self, default: Policy, own: dict[str, Policy]) -> None:
        super().__init__(own)
        self._default = default

    def __missing__(self, tenant: str) -> Policy:
        return self._default


def _query(arrival: Arrival, block_size: int) -> Query:
    return Query(
        number=arrival.number,
        request_id=arrival.request_id,
        hashes=arrival.hashes,
        num_prompt_tokens=arrival.num_prompt_tokens,
        block_size=block_size,
        session=arrival.session,
    )
