"""Whether guessing pays: never much lost, all gained that can be, tried again from time to time."""

from __future__ import annotations

import pytest

from engine.spec_decode.acceptance import Acceptance
from engine.spec_decode.payoff import Payoff, StepCosts

MAX_DRAFTS = 8


class Decoding:
    """One request on a machine where a step costs 1, and `slope` more per further row.

    What steps cost was measured when it started.
    """

    def __init__(self, *, slope: float, num_requests: int = 1) -> None:
        self.payoff = Payoff(max_drafts=MAX_DRAFTS)
        self.slope = slope
        self.num_requests = num_requests
        self.num_tokens = 0
        self.seconds = 0.0
        self.num_tried = 0
        for rows in (num_requests, num_requests + MAX_DRAFTS):
            self.payoff.costs.observe(rows, 1 + slope * (rows - 1))

    def run(self, num_tokens: int, *, num_right: int) -> None:
        """Decode so many tokens; of each row of guesses so many are right."""
        end = self.num_tokens + num_tokens
        while self.num_tokens < end:
            n = self.num_requests
            limit = self.payoff.limit("a", num_requests=n, num_rows=n)
            accepted = min(num_right, limit)
            self._step(limit)
            if limit:
                self.num_tried += 1
                self.payoff.observe("a", num_drafted=limit, num_accepted=accepted)
            self.num_tokens += accepted

    def _step(self, num_drafts: int) -> None:
        rows = self.num_requests + num_drafts
        step_s = 1 + self.slope * (rows - 1)
        self.payoff.costs.observe(rows, step_s)
        self.seconds += step_s
        self.num_tokens += 1


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("num_tokens", [32, 200, 1000])
def test_where_nothing_can_be_guessed_less_than_three_percent_are_lost(
    slope: float, num_tokens: int
) -> None:
    decoding = Decoding(slope=slope)
    decoding.run(num_tokens, num_right=0)
    assert decoding.seconds <= 1.03 * decoding.num_tokens


@pytest.mark.parametrize("slope", [0.02, 0.1])
def test_where_all_is_guessed_right_all_guesses_are_verified(slope: float) -> None:
    decoding = Decoding(slope=slope)
    decoding.run(400, num_right=MAX_DRAFTS)
    best = (1 + MAX_DRAFTS) / (1 + slope * MAX_DRAFTS)
    assert decoding.num_tokens / decoding.seconds > 0.9 * best


def test_guessing_is_tried_again_when_it_has_failed_for_long() -> None:
    decoding = Decoding(slope=0.1)
    decoding.run(500, num_right=0)
    tried = decoding.num_tried
    decoding.run(500, num_right=0)
    assert decoding.num_tried > tried
    before = decoding.seconds
    decoding.run(300, num_right=MAX_DRAFTS)
    assert decoding.seconds - before < 150


def test_a_full_batch_that_pays_for_every_row_does_not_guess_badly() -> None:
    """Sixteen requests, a row costs as much as a token: one right guess in four does not pay."""
    decoding = Decoding(slope=1.0, num_requests=16)
    decoding.run(600, num_right=0)
    assert decoding.num_tried <= 10


def test_nothing_is_guessed_before_a_step_was_measured() -> None:
    assert Payoff(max_drafts=4).limit("a", num_requests=1, num_rows=1) == 0


def test_costs_between_measurements_lie_on_a_line() -> None:
    costs = StepCosts()
    assert costs.of(3) is None
    costs.observe(2, 1.0)
    assert costs.of(2) == 1.0
    assert costs.of(4) == pytest.approx(1.3)
    assert costs.of(1) == pytest.approx(1 / 1.15)
    costs.observe(6, 2.0)
    assert costs.of(4) == pytest.approx(1.5)


def test_one_slow_step_does_not_change_what_a_step_costs() -> None:
    costs = StepCosts()
    for step_s in (1.0, 1.0, 9.0, 1.0):
        costs.observe(1, step_s)
    assert costs.of(1) == 1.0


def test_a_request_that_comes_back_begins_with_a_new_account() -> None:
    decoding = Decoding(slope=0.35)
    while decoding.num_tried < 3:
        decoding.run(1, num_right=0)
    assert decoding.payoff.limit("a", num_requests=1, num_rows=1) == 0
    decoding.payoff.forget("a")
    decoding.payoff.forget("unknown")
    assert decoding.payoff.limit("a", num_requests=1, num_rows=1) > 0


def test_acceptance_counts_each_place_of_a_row() -> None:
    acceptance = Acceptance()
    acceptance.observe(num_drafted=3, num_accepted=2)
    acceptance.observe(num_drafted=4, num_accepted=1)
    assert acceptance == Acceptance(
        num_drafts=2, num_tokens=7, num_accepted=3, accepted_at=[2, 1, 0, 0]
    )
