"""What a simulated gateway asks its router, and what it may be answered.

Plain values and one Protocol; our planner and the baselines are behind it (routers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvindex.index import Target
from router.policy.planner import Outcome
from router.policy.types import Decision, TargetView, Wait
from sim.workload import Arrival


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to serve an arrival; `tried` are the replicas that have failed it.

    `num_emitted` tokens of its answer are there already, and are computed again like a prompt.
    """

    arrival: Arrival
    number: int = 1
    tried: frozenset[str] = frozenset()
    num_emitted: int = 0


class Placed(msgspec.Struct, frozen=True):
    """Where an attempt went and what was expected; `decision` is None for baselines."""

    target: Target
    num_predicted_tokens: int
    num_uncached_tokens: int
    num_matched_blocks: int
    expected_s: float
    decision: Decision | None


class Refused(msgspec.Struct, frozen=True):
    """Nobody takes it: `shed` because all are too far behind, else because none can."""

    shed: bool
    decision: Decision | None


class Waiting(msgspec.Struct, frozen=True):
    """It stays with its gateway until the planner gives it the turn."""

    decision: Wait


Choice = Placed | Refused | Waiting

Observer = Callable[[Attempt, Sequence[TargetView], Choice], None]


class Router(Protocol):
    """Chooses, and is told what becomes of it."""

    def choose(
        self, attempt: Attempt, views: Sequence[TargetView], block_size: int, now: float
    ) -> Choice: ...

    def first_token(self, attempt: Attempt) -> None: ...

    def finish(self, attempt: Attempt, outcome: Outcome, now: float) -> None: ...

    def own_work(self, target: Target) -> tuple[int, int]:
        """Return the prefill tokens and the requests that it has running at a target."""
        ...

    def next_turn(self, now: float) -> str | None:
        """Return the waiting request that is to be placed now, if any."""
        ...

    def next_instant(self) -> float | None:
        """Return when to ask for the next turn although nothing has happened."""
        ...

    def forget(self, replica: str) -> None:
        """Drop what is remembered of a replica that was replaced."""
        ...
