"""What the replay takes over from the live gateway's records, and what it works out itself."""

from __future__ import annotations

from typing import Any

from kvindex.index import Target
from router.policy.planner import PlannerConfig
from router.policy.queueing import QueueConfig
from router.policy.types import Candidate, Place, PlanRequest
from sim.config import ReplayConfig
from sim.live.drive import Driven
from sim.live.messages import LiveAttempt, LiveRecord, Received
from sim.live.twin import Twin, replay_driven, targets_weighed
from tests.sim.live.test_compare import candidate
from tests.sim.replaying import BLOCK_SIZE, HEADER, config, row

LEFT, RIGHT = Target("left"), Target("right")


def driven(
    line: int, ids: list[int], *candidates: Candidate, at: float = 0.0, queue_s: float = 0.25
) -> Driven:
    """Return a request that the gateway placed at `at`, weighing these candidates."""
    decision = Place(winner=candidates[0], policy="prefix_cost", candidates=candidates)
    request = PlanRequest(
        request_id="", tenant="acme", model="m", num_prompt_tokens=1, num_total_tokens=1
    )
    record = LiveRecord(
        request_id=f"r{line}",
        unique_id=f"r{line}.1",
        tenant="acme",
        at=at + 5.0,
        duration_s=5.0 + queue_s,
        queue_s=queue_s,
        attempts=(LiveAttempt(decision=decision, request=request),),
    )
    received = Received(sent_at=100.0 - line, status=200, replica=candidates[0].target.replica)
    return Driven(row=row(line, 0.0, ids), received=received, record=record)


def played(*live: Driven, **fields: Any) -> Twin:
    settings: ReplayConfig = config(mode="open", **fields)
    targets = targets_weighed(live)
    return replay_driven(HEADER, live, settings, gateway="gw", targets=targets)


def chosen(twin: Twin) -> list[str]:
    """Return the replicas in the order of the decisions."""
    answers = sorted(twin.outcomes.answers, key=lambda answer: answer.number)
    return [twin.replicas[answer.replica] for answer in answers]


def test_a_tie_goes_to_whom_the_live_gateway_had_placed_least_recently() -> None:
    both = candidate("left", last_placed=5), candidate("right", last_placed=3)
    again = candidate("left", last_placed=5), candidate("right", last_placed=6)
    twin = played(driven(1, [1], *both), driven(2, [2], *again, at=100.0))
    assert chosen(twin) == ["right", "left"]
    decision = twin.decisions[1]
    assert isinstance(decision, Place)
    assert {c.target: c.last_placed for c in decision.candidates} == {LEFT: 5, RIGHT: 6}


def test_the_speeds_are_those_that_were_recorded_with_each_decision() -> None:
    fast = {"prefill_tokens_per_s": 1000.0}
    slow = {"prefill_tokens_per_s": 100.0}
    twin = played(
        driven(1, [1], candidate("left", **fast), candidate("right", **slow)),
        driven(
            2, [2], candidate("left", last_placed=1, **slow), candidate("right", **fast), at=9.0
        ),
    )
    assert chosen(twin) == ["left", "right"]


def test_requests_are_replayed_in_the_order_and_at_the_instants_of_their_placement() -> None:
    second = driven(1, [1], candidate("left", last_placed=1), candidate("right"), at=7.5)
    first = driven(2, [2], candidate("left"), candidate("right"), at=4.0)
    twin = played(second, first)
    assert [one.row.line for one in twin.driven] == [2, 1]
    instants = {answer.line: answer.at_s for answer in twin.outcomes.answers}
    assert instants == {2: 0.0, 1: 3.5}


def test_what_is_cached_is_worked_out_and_not_taken_over() -> None:
    untrue = {"num_cached_tokens": 999, "num_reusable_tokens": 999}
    left, right = candidate("left", **untrue), candidate("right", **untrue)
    again = candidate("left", last_placed=1, **untrue)
    twin = played(driven(1, [1, 2], left, right), driven(2, [1, 2], again, right, at=60.0))
    hits = {answer.line: answer.num_hit_tokens for answer in twin.outcomes.answers}
    assert hits == {1: 0, 2: 2 * BLOCK_SIZE}


def test_what_waited_live_comes_when_it_came_behind_those_that_were_placed_at_once() -> None:
    first = driven(1, [1], candidate("left"), candidate("right"), at=4.25)
    waited = driven(
        2, [2], candidate("left", last_placed=2), candidate("right", last_placed=1), at=9.0,
        queue_s=4.97,
    )  # fmt: skip
    later = driven(3, [3], candidate("left", last_placed=1), candidate("right"), at=6.25)
    twin = played(waited, later, first)
    assert [one.row.line for one in twin.driven] == [1, 2, 3]
    instants = {answer.line: answer.at_s for answer in twin.outcomes.answers}
    assert instants == {1: 0.0, 2: 0.0, 3: 2.0}


def test_of_what_waits_in_the_replay_the_decision_is_that_which_placed_it() -> None:
    busy = PlannerConfig(queue=QueueConfig(accept_s=0.001))
    twin = played(
        driven(1, [1, 2], candidate("left")),
        driven(2, [3, 4], candidate("left")),
        planner=busy,
        replicas=1,
    )
    assert [type(twin.decisions[number]) for number in (0, 1)] == [Place, Place]
