"""Replays in virtual time: instants can be computed by hand, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.planner import PlannerConfig
from router.policy.queueing import QueueConfig
from sim.config import Failure, ViewConfig
from sim.latency import LatencyModel
from sim.outcomes import Outcomes
from sim.replay import read_bounds, report_replay, run_replay
from sim.traces.row import TraceRow
from tests.sim.replaying import HEADER, conversation, fixture, plain, play, row

SIMPLE = LatencyModel(name="simple", base_s=0.25, per_prefill_token_s=0.0625)
"""A step takes 0.25 s, and each prompt token of it 0.0625 s more: exact in binary."""


@pytest.fixture
def latency(tmp_path: Path) -> str:
    """Return a file with the simple model."""
    file = tmp_path / "simple.json"
    file.write_bytes(msgspec.json.encode(SIMPLE))
    return str(file)


def timed(rows: list[TraceRow], latency: str, **fields: Any) -> Outcomes:
    return play(rows, latency=latency, **({"mode": "open"} | fields))


def test_one_request_takes_its_prefill_and_one_step_per_further_token(latency: str) -> None:
    (answer,) = timed([row(1, 2.0, [1, 2])], latency).answers
    # 33 prompt tokens fit into one step of at most 64; then three more tokens.
    assert answer.queue_s == 0.0
    assert answer.prefill_s == 0.25 + 33 * 0.0625
    assert answer.total_s == 0.25 + 33 * 0.0625 + 3 * 0.25
    assert answer.at_s == 2.0


def test_a_cached_prefix_saves_its_prefill(latency: str) -> None:
    first, second = timed([row(1, 0.0, [1, 2]), row(2, 50.0, [1, 2])], latency).answers
    assert (first.replica, second.replica) == (first.replica, first.replica)
    assert second.num_hit_tokens == second.num_predicted_tokens == 32
    assert second.prefill_s == 0.25  # one token is left to compute


def test_a_request_that_comes_during_a_step_waits_for_its_end(latency: str) -> None:
    rows = [row(1, 0.0, [1, 2]), row(2, 1.0, [3, 4])]
    outcomes = timed(rows, latency, replicas=1)
    second = next(a for a in outcomes.answers if a.line == 2)
    assert second.queue_s == pytest.approx(0.25 + 33 * 0.0625 - 1.0)


def test_arrivals_follow_the_speed_up_and_the_window(latency: str) -> None:
    rows = [row(line, 10.0 * line, [line]) for line in range(1, 6)]
    outcomes = timed(rows, latency, speed_up=2.0, window=(20.0, 45.0))
    assert [(a.line, a.at_s) for a in outcomes.answers] == [(2, 0.0), (3, 5.0), (4, 10.0)]


def test_fixed_concurrency_keeps_so_many_in_flight(latency: str) -> None:
    rows = [row(line, 1000.0 * line, [line]) for line in range(1, 9)]
    outcomes = timed(rows, latency, mode="fixed", in_flight=2, replicas=2)
    assert sorted(a.line for a in outcomes.answers) == list(range(1, 9))
    assert [a.at_s for a in sorted(outcomes.answers, key=lambda a: a.line)][:2] == [0.0, 0.0]
    assert outcomes.duration_s == pytest.approx(4 * (0.25 + 17 * 0.0625 + 3 * 0.25))


def test_a_turn_of_a_session_follows_the_answer_to_the_turn_before(latency: str) -> None:
    rows = [
        row(1, 0.0, [1], session_id="s"),
        row(2, 1.0, [1, 2], session_id="s", delay_s=8.0),
        row(3, 2.0, [1, 2, 3], session_id="s"),
    ]
    outcomes = timed(rows, latency, mode="closed", replicas=1)
    first, second, third = outcomes.answers
    assert second.at_s == (first.total_s or 0.0) + 8.0
    assert third.at_s == second.at_s + (second.total_s or 0.0) + 1.0


def test_a_request_too_long_for_every_replica_is_refused_once(latency: str) -> None:
    outcomes = timed([row(1, 0.0, range(70)), row(2, 0.0, [1])], latency)
    assert [(r.line, r.why) for r in outcomes.refused] == [(1, "too_long")]
    assert [a.line for a in outcomes.answers] == [2]


def test_a_fleet_that_is_too_far_behind_sheds(latency: str) -> None:
    rows = [row(line, 0.0, [line * 100 + i for i in range(40)]) for line in range(1, 40)]
    outcomes = timed(rows, latency, planner=PlannerConfig(max_queue_s=2.0))
    assert {r.why for r in outcomes.refused} == {"shed"}
    assert len(outcomes.answers) + len(outcomes.refused) == 39
    assert outcomes.answers


def test_with_a_queue_requests_wait_at_the_gateway_for_their_turn(latency: str) -> None:
    rows = [
        row(line, 0.0, [line * 100 + i for i in range(4)], tenant="ab"[line % 2])
        for line in range(1, 13)
    ]
    queue = PlannerConfig(queue=QueueConfig(accept_s=0.5))
    outcomes = timed(rows, latency, replicas=1, planner=queue)
    assert len(outcomes.answers) == 12
    order = [a.tenant for a in sorted(outcomes.answers, key=lambda a: a.queue_s or 0.0)]
    assert order[2:6].count("a") == 2  # in turns, although all came at once


@pytest.mark.parametrize("policy", ["prefix_cost", "hash_of_prefix"])
def test_requests_survive_the_death_of_their_replica(latency: str, policy: str) -> None:
    rows = [row(line, 0.1 * line, [line], output_length=40) for line in range(1, 21)]
    failures = (Failure(replica=0, at_s=3.0, down_s=60.0),)
    outcomes = timed(rows, latency, policy=policy, failures=failures)
    assert sorted(a.line for a in outcomes.answers) == list(range(1, 21))
    moved = [a for a in outcomes.answers if a.num_attempts == 2]
    assert moved
    assert {a.replica for a in moved} == {1}
    assert outcomes.num_retries == len(moved)


def test_a_restarted_replica_serves_again_from_an_empty_cache(latency: str) -> None:
    rows = [row(1, 0.0, [1, 2]), row(2, 50.0, [1, 2])]
    failures = (Failure(replica=0, at_s=20.0, down_s=5.0),)
    outcomes = timed(rows, latency, replicas=1, failures=failures)
    assert [a.num_hit_tokens for a in outcomes.answers] == [0, 0]
    assert [a.num_predicted_tokens for a in outcomes.answers] == [0, 0]


def test_while_every_replica_is_down_requests_are_refused(latency: str) -> None:
    failures = (Failure(replica=0, at_s=1.0, down_s=50.0),)
    outcomes = timed([row(1, 20.0, [1])], latency, replicas=1, failures=failures)
    assert [r.why for r in outcomes.refused] == ["no_replica"]


def test_late_events_hide_what_was_just_cached(latency: str) -> None:
    rows = [row(1, 0.0, [1, 2]), row(2, 10.0, [1, 2])]
    seen = [
        timed(rows, latency, replicas=1, view=ViewConfig(delay_s=delay_s)).answers[1]
        for delay_s in (0.0, 30.0)
    ]
    assert [a.num_predicted_tokens for a in seen] == [32, 0]
    assert [a.num_hit_tokens for a in seen] == [32, 32]


def test_a_router_without_events_knows_its_own_placements_only(latency: str) -> None:
    rows = [row(1, 0.0, [1, 2]), row(2, 50.0, [1, 2]), row(3, 100.0, [1, 2])]
    outcomes = timed(rows, latency, gateways=2, view=ViewConfig(kind="history"))
    # Requests alternate between the gateways: the third is the first one's gateway again.
    assert [a.num_predicted_tokens for a in outcomes.answers] == [0, 0, 32]


def test_gateways_that_share_an_index_see_each_others_work(latency: str) -> None:
    rows = [row(line, 0.0, [line * 100 + i for i in range(8)]) for line in (1, 2)]
    outcomes = timed(rows, latency, gateways=2)
    assert {a.replica for a in outcomes.answers} == {0, 1}


@pytest.mark.parametrize("mode", ["open", "closed", "fixed"])
def test_every_request_ends_exactly_once_and_nobody_beats_the_bound(mode: str) -> None:
    trace = fixture("magagent_mooncake16.jsonl.xz", block_size=16, lengths="approximate")
    window = (0.0, 500.0)
    config = plain(mode=mode, replicas=2, blocks=512, speed_up=20.0, window=window)
    bounds = read_bounds(trace.header, trace.rows, config)
    report = report_replay(trace.header, trace.rows, config, bounds=bounds)
    assert report.answered + report.shed + report.refused == report.requests == 88
    assert report.bounds is not None
    assert report.hit_blocks is not None
    assert report.hit_blocks <= report.bounds.infinite_hit_blocks


def test_greedy_longest_prefix_collapses_in_time_too() -> None:
    trace = conversation()
    config = plain(mode="open", policy="greedy_prefix", replicas=4, window=(0.0, 60.0))
    outcomes = run_replay(trace.header, trace.rows, config)
    assert {a.replica for a in outcomes.answers} == {0}


def test_requests_without_prefix_information_have_an_unknown_hit_rate(latency: str) -> None:
    rows = [row(line, float(line), [1], hash_ids=None) for line in (1, 2)]
    config = plain(mode="open", latency=latency, block_size=16)
    report = report_replay(HEADER, lambda: rows, config, bounds=None)
    assert report.answered == 2
    assert report.hit_tokens is None
    assert report.token_hit is None


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.1, 0.7, 3.0]), min_size=1, max_size=25),
    deaths=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 30, width=16), st.floats(1, 20, width=16)),
        max_size=3,
    ),
    mode=st.sampled_from(["open", "closed", "fixed"]),
    gateways=st.integers(1, 2),
    queue=st.sampled_from([None, QueueConfig(accept_s=1.0)]),
)
def test_whatever_dies_every_request_ends_exactly_once(
    gaps: list[float],
    deaths: list[tuple[int, float, float]],
    mode: str,
    gateways: int,
    queue: QueueConfig | None,
) -> None:
    rows, at_s = [], 0.0
    for line, gap_s in enumerate(gaps, start=1):
        at_s += gap_s
        ids = [line % 3, *range(line * 10, line * 10 + line % 4)]
        session = f"s{line % 5}" if line % 2 else None
        rows.append(row(line, at_s, ids, output_length=1 + line % 30, session_id=session))
    outcomes = play(
        rows,
        mode=mode,
        replicas=3,
        blocks=24,
        gateways=gateways,
        planner=PlannerConfig(queue=queue),
        failures=tuple(Failure(replica=r, at_s=at, down_s=down) for r, at, down in deaths),
        view=ViewConfig(delay_s=0.1),
        latency="l4-8b",
    )
    ended = [a.line for a in outcomes.answers] + [r.line for r in outcomes.refused]
    assert sorted(ended) == list(range(1, len(rows) + 1))
    if not deaths:
        assert not outcomes.refused
    for answer in outcomes.answers:
        assert answer.ttft_s is not None
        assert answer.total_s is not None
        assert 0 <= answer.ttft_s <= answer.total_s


@pytest.mark.slow
def test_greedy_longest_prefix_collapses_on_the_whole_conversation_trace() -> None:
    trace = fixture("conversation_trace.jsonl.xz")
    config = plain(policy="greedy_prefix", replicas=8)
    report = report_replay(trace.header, trace.rows, config, bounds=None)
    assert report.imbalance == 8.0
    assert report.collapsed
