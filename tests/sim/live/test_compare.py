"""Both sides of a request, by hand: what counts as equal, and what is said of a difference."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvindex.index import Target
from router.policy.types import Candidate, Place
from sim.live.compare import BY_THE_CLOCK, ONE_BY_ONE, Tolerance, compare
from sim.live.drive import Driven
from sim.live.messages import LiveAttempt, LiveRecord, Received
from sim.live.twin import Twin
from sim.live.validate_text import validation_text
from sim.live.validation import Validation
from sim.outcomes import Answer, Outcomes
from tests.sim.replaying import row


def candidate(replica: str, **fields: Any) -> Candidate:
    known: dict[str, Any] = {
        "target": Target(replica),
        "mode": "EXACT",
        "num_cached_tokens": 0,
        "num_reusable_tokens": 0,
        "num_uncached_tokens": 100,
        "num_active": 0,
        "queued_prefill_tokens": 0,
        "last_placed": 0,
        "prefill_tokens_per_s": 1000.0,
        "queue_s": 0.0,
        "expected_s": 0.1,
        "score": 0.2,
    }
    return Candidate(**(known | fields))


def place(winner: str, **of_a: Any) -> Place:
    both = (candidate("a", **of_a), candidate("b"))
    chosen = next(c for c in both if c.target.replica == winner)
    return Place(winner=chosen, policy="prefix_cost", candidates=both)


def driven(line: int, replica: str, cached: int, decision: Place | None = None) -> Driven:
    record = None
    if decision is not None:
        record = LiveRecord(
            request_id=f"r{line}",
            unique_id=f"r{line}.1",
            tenant="acme",
            at=0.0,
            duration_s=0.0,
            attempts=(LiveAttempt(decision=decision),),
        )
    received = Received(
        sent_at=0.0,
        status=200,
        request_id=f"r{line}",
        replica=replica,
        num_predicted_tokens=cached,
        num_prompt_tokens=100,
        num_cached_tokens=cached,
        token_at=(0.2,),
    )
    return Driven(row=row(line, 0.0, [line]), received=received, record=record)


def refused(line: int) -> Driven:
    received = Received(sent_at=0.0, status=429, error="every replica is too far behind")
    return Driven(row=row(line, 0.0, [line]), received=received)


def answer(number: int, replica: int, cached: int) -> Answer:
    return Answer(
        number=number,
        line=number,
        at_s=0.0,
        tenant="acme",
        replica=replica,
        num_prompt_tokens=100,
        num_output_tokens=1,
        num_blocks=6,
        num_hit_blocks=cached // 16,
        num_hit_tokens=cached,
        num_predicted_tokens=cached,
        queue_s=0.0,
        prefill_s=0.1,
    )


def twin(
    live: list[Driven], answers: list[Answer], decisions: dict[int, Place] | None = None
) -> Twin:
    return Twin(
        driven=tuple(live),
        outcomes=Outcomes(answers=answers),
        replicas=("a", "b"),
        decisions=decisions or {},
    )


def test_equal_answers_are_within_every_tolerance() -> None:
    found = compare(twin([driven(1, "a", 32)], [answer(0, 0, 32)]), ONE_BY_ONE)
    assert found.exceeded == ()
    assert found.first_difference is None
    assert (found.hit_rate_live, found.hit_points) == (0.32, 0.0)
    assert found.ttft_ratio is not None
    assert found.ttft_ratio.p50 == pytest.approx(0.5)


def test_whoever_got_its_head_while_it_waited_was_served_where_its_record_says() -> None:
    one = driven(1, "b", 32, place("b"))
    headless = msgspec.structs.replace(
        one, received=msgspec.structs.replace(one.received, replica=None)
    )
    found = compare(twin([headless], [answer(0, 1, 32)]), ONE_BY_ONE)
    assert (found.equal_replica, found.exceeded) == (1, ())


def test_the_time_outside_of_the_engine_belongs_to_the_replays_first_token() -> None:
    found = compare(twin([driven(1, "a", 0)], [answer(0, 0, 0)]), ONE_BY_ONE, outside_s=0.1)
    assert found.ttft_ratio is not None
    assert found.ttft_ratio.p95 == pytest.approx(1.0)


def test_times_are_compared_of_what_both_answered() -> None:
    late = msgspec.structs.replace(answer(1, 0, 0), queue_s=60.0)
    pair = twin([driven(1, "a", 0), refused(2)], [answer(0, 0, 0), late])
    found = compare(pair, Tolerance())
    assert (found.answered_live, found.answered_replay) == (1, 2)
    assert found.ttft_ratio is not None
    assert found.ttft_ratio.p95 == pytest.approx(0.5)


def test_what_is_over_tolerance_is_said_with_both_numbers() -> None:
    pair = twin(
        [driven(1, "a", 32), driven(2, "b", 16)],
        [answer(0, 0, 32), answer(1, 0, 48)],
    )
    tolerance = Tolerance(cached=1.0, replica=0.99, hit=1.0, ttft=0.15)
    assert compare(pair, tolerance).exceeded == (
        "cached tokens equal for 1 of 2 requests, 100 % wanted",
        "the chosen replica equal for 1 of 2 requests, 99 % wanted",
        "the hit rate differs by +16.00 points, 1 allowed",
        "TTFT p50 of the replay is 0.500 times the live one, 0.85 to 1.15 allowed",
        "TTFT p95 of the replay is 0.500 times the live one, 0.85 to 1.15 allowed",
    )
    assert compare(pair, Tolerance()).exceeded == ()


def test_the_first_difference_names_what_the_two_decisions_saw() -> None:
    live, replayed = place("a", num_cached_tokens=32), place("b", num_cached_tokens=16)
    pair = twin([driven(4, "a", 32, live)], [answer(0, 1, 0)], {0: replayed})
    first = compare(pair, BY_THE_CLOCK).first_difference
    assert first is not None
    assert (first.line, first.live.replica, first.replay.replica) == (4, "a", "b")
    assert first.why == "a/0: num_cached_tokens was 32 live, 16 in the replay"


def test_equal_views_with_another_choice_or_another_hit_are_told_apart() -> None:
    other_choice = twin([driven(1, "a", 0, place("a"))], [answer(0, 1, 0)], {0: place("b")})
    first = compare(other_choice, BY_THE_CLOCK).first_difference
    assert first is not None
    assert first.why == "both weighed the same and chose differently"
    other_hit = twin([driven(1, "a", 0, place("a"))], [answer(0, 0, 16)], {0: place("a")})
    first = compare(other_hit, BY_THE_CLOCK).first_difference
    assert first is not None
    assert first.why == (
        "same replica and same view, but 0 tokens were cached live (predicted 0), 16 in the replay"
    )


def test_a_request_that_only_one_side_answered_is_a_difference() -> None:
    found = compare(twin([refused(1)], [answer(0, 0, 0)]), BY_THE_CLOCK)
    assert (found.answered_live, found.answered_replay, found.equal_outcome) == (0, 1, 0)
    assert found.first_difference is not None
    assert found.first_difference.why == ("live: every replica is too far behind; replay: answered")
    both = compare(twin([refused(1)], []), BY_THE_CLOCK)
    assert both.exceeded == ()


def test_the_text_shows_the_figures_the_difference_and_the_verdict() -> None:
    pair = twin([driven(4, "a", 32, place("a"))], [answer(0, 1, 0)], {0: place("b")})
    report = Validation(
        trace="t.jsonl",
        model="tiny",
        mode="one by one",
        policy="prefix_cost",
        params={},
        replicas=("a", "b"),
        blocks=64,
        block_size=16,
        latency="h100-8b",
        num_too_long=2,
        tolerance=ONE_BY_ONE,
        comparison=compare(pair, ONE_BY_ONE),
    )
    text = validation_text(report)
    assert "Left out as too long for the fleet: 2." in text
    assert "First difference: line 4, request r4: both weighed the same" in text
    assert "* a/0" in text
    assert "the hit rate differs by -32.00 points, 0 allowed" in text
