"""The real planner in a replay of what a live gateway has done.

A gateway decides by what it cannot compute: the speeds that its replicas have measured, the names
of gateway and replicas, and where it placed requests before. These are handed to the planner as
they were recorded; everything else, caches, queues and choices, is the replay's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvindex.index import Target
from router.policy.ledger import Account
from router.policy.planner import Outcome
from router.policy.types import Candidate, Decision, TargetView
from sim.placement import Attempt, Choice, Placed, Waiting
from sim.routers import PlannedRouter


@dataclass(slots=True)
class LiveRouter:
    """A router under the names of the live fleet.

    `live` maps the replay's targets to the fleet's; `recorded` has the candidates of the live
    decision by number of the request. `decided` keeps what was decided here, by the same number,
    once there was a place or a refusal.
    """

    inner: PlannedRouter
    live: Mapping[Target, Target]
    recorded: Mapping[int, Sequence[Candidate]]
    decided: dict[int, Decision] = field(default_factory=dict)
    _rated: dict[Target, Candidate] = field(default_factory=dict)

    def remember(self, candidates: Sequence[Candidate]) -> None:
        """Begin with the placements that the gateway had made before the first decision."""
        ledger = self.inner.planner.ledger
        for candidate in candidates:
            if candidate.last_placed:
                ledger.accounts[candidate.target] = Account(last_placed=candidate.last_placed)
        ledger.num_placed = max((c.last_placed for c in candidates), default=0)

    def choose(
        self, attempt: Attempt, views: Sequence[TargetView], block_size: int, now: float
    ) -> Choice:
        """Plan under live names and speeds; the answer is in the replay's names."""
        number = attempt.arrival.number
        for candidate in self.recorded.get(number, ()):
            self._rated[candidate.target] = candidate
        chosen = self.inner.choose(attempt, [self._as_live(v) for v in views], block_size, now)
        if chosen.decision is not None and not isinstance(chosen, Waiting):
            self.decided.setdefault(number, chosen.decision)
        if not isinstance(chosen, Placed):
            return chosen
        target = next(own for own, live in self.live.items() if live == chosen.target)
        return msgspec.structs.replace(chosen, target=target)

    def first_token(self, attempt: Attempt) -> None:
        """Pass it on."""
        self.inner.first_token(attempt)

    def finish(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Pass it on."""
        self.inner.finish(attempt, outcome, now)

    def own_work(self, target: Target) -> tuple[int, int]:
        """Return what runs at a target of the replay."""
        return self.inner.own_work(self.live[target])

    def next_turn(self, now: float) -> str | None:
        """Pass it on."""
        return self.inner.next_turn(now)

    def next_instant(self) -> float | None:
        """Pass it on."""
        return self.inner.next_instant()

    def forget(self, replica: str) -> None:
        """Pass it on under the live name."""
        self.inner.forget(self.live[Target(replica)].replica)

    def _as_live(self, view: TargetView) -> TargetView:
        target = self.live[view.target]
        rated = self._rated.get(target)
        if rated is None:
            return msgspec.structs.replace(view, target=target)
        return msgspec.structs.replace(
            view, target=target, prefill_tokens_per_s=rated.prefill_tokens_per_s
        )
