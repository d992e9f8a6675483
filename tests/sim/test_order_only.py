"""Replays without a clock: the real pool is exactly an LRU cache, the real planner places."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvindex.foundation.errors import ConfigError
from sim.config import ViewConfig
from sim.oracle.lru import lru_curve
from sim.oracle.reuse import reuse_of
from sim.replay import read_bounds, report_replay, run_replay
from sim.traces.row import TraceRow
from tests.sim.replaying import BLOCK_SIZE, conversation, fixture, plain, play, row


def forest(count: int, *, seed: int) -> list[TraceRow]:
    """Return requests that continue, branch off and repeat each other."""
    source = random.Random(seed)
    chains: list[list[int]] = [[]]
    rows = []
    for line in range(1, count + 1):
        known = source.choice(chains)
        kept = known[: source.randint(0, len(known))]
        chain = [*kept, *(line * 100 + i for i in range(source.randint(1, 6)))]
        chains.append(chain)
        rows.append(row(line, float(line), chain))
    return rows


@pytest.mark.parametrize("blocks", [16, 40, 100, 1000])
def test_one_replica_hits_what_an_lru_cache_hits(blocks: int) -> None:
    rows = [r for r in forest(300, seed=blocks) if len(r.hash_ids or ()) <= blocks]
    outcomes = play(rows, replicas=1, blocks=blocks, policy="round_robin")
    expected = lru_curve(reuse_of(rows, block_size=BLOCK_SIZE)).hit_blocks(blocks)
    assert sum(answer.num_hit_blocks for answer in outcomes.answers) == expected


def test_a_whole_prompt_that_is_cached_still_computes_its_last_block() -> None:
    twice = [row(1, 0.0, [1, 2, 3], input_length=48), row(2, 1.0, [1, 2, 3], input_length=48)]
    outcomes = play(twice, replicas=1, policy="round_robin")
    assert [answer.num_hit_blocks for answer in outcomes.answers] == [0, 2]


def test_a_prompt_larger_than_the_cache_keeps_its_leading_part() -> None:
    long = [row(line, float(line), range(20)) for line in (1, 2)]
    outcomes = play(long, replicas=1, blocks=8, policy="round_robin")
    assert [answer.num_hit_blocks for answer in outcomes.answers] == [0, 8]


def test_what_the_router_predicts_is_what_the_cache_has() -> None:
    outcomes = play(forest(300, seed=5), replicas=3, blocks=60)
    for answer in outcomes.answers:
        assert answer.num_predicted_tokens == answer.num_hit_tokens


def test_greedy_longest_prefix_collapses_on_conversations() -> None:
    trace = conversation()
    config = plain(policy="greedy_prefix", replicas=4)
    report = report_replay(trace.header, trace.rows, config, bounds=None)
    assert report.imbalance == 4.0
    assert report.collapsed
    assert [share.requests for share in report.per_replica] == [1000, 0, 0, 0]


def test_the_default_policy_stays_balanced_and_hits_more_than_blind_ones() -> None:
    trace = conversation()
    reports = {
        policy: report_replay(
            trace.header, trace.rows, plain(policy=policy, replicas=4), bounds=None
        )
        for policy in ("prefix_cost", "round_robin")
    }
    cost, blind = reports["prefix_cost"], reports["round_robin"]
    assert cost.imbalance is not None
    assert cost.imbalance < 1.2
    assert cost.hit_blocks is not None
    assert blind.hit_blocks is not None
    assert cost.hit_blocks > 2 * blind.hit_blocks


@pytest.mark.parametrize("policy", ["prefix_cost", "hash_of_prefix", "sticky_session"])
def test_nobody_hits_more_than_the_bounds(policy: str) -> None:
    trace = fixture("synthetic_first1000.jsonl.gz")
    config = plain(policy=policy, replicas=4, blocks=512)
    bounds = read_bounds(trace.header, trace.rows, config)
    report = report_replay(trace.header, trace.rows, config, bounds=bounds)
    assert report.answered == report.requests == 1000
    assert report.bounds is not None
    assert report.hit_blocks is not None
    assert report.bounds.pooled_belady_hit_blocks is not None
    assert report.hit_blocks <= report.bounds.pooled_belady_hit_blocks
    assert report.bounds.pooled_belady_hit_blocks <= report.bounds.infinite_hit_blocks


def test_the_bound_is_a_set_of_what_was_seen() -> None:
    rows = forest(200, seed=9)
    config = msgspec.structs.replace(plain(), replicas=1, blocks=100_000, policy="round_robin")
    header = conversation().header
    header = msgspec.structs.replace(header, block_size=BLOCK_SIZE, tail="floor")
    report = report_replay(
        header, lambda: rows, config, bounds=read_bounds(header, lambda: rows, config)
    )
    seen: set[int] = set()
    expected = 0
    for one in rows:
        ids = one.hash_ids or ()
        expected += sum(1 for block in ids if block in seen)
        seen.update(ids)
    assert report.hit_blocks == expected
    assert report.of_infinite_bound == 1.0


def test_lost_events_are_repaired_from_a_snapshot() -> None:
    rows = forest(300, seed=3)
    lossy = play(rows, replicas=2, blocks=60, view=ViewConfig(loss=0.3))
    assert lossy.num_gaps > 30
    wrong = sum(a.num_predicted_tokens != a.num_hit_tokens for a in lossy.answers)
    assert 0 < wrong < 100


def test_settings_that_need_a_clock_are_refused() -> None:
    with pytest.raises(ConfigError, match="--view-delay needs a clock: give --mode open"):
        run_replay(conversation().header, list, plain(view=ViewConfig(delay_s=1.0)))
