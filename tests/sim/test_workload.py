"""From rows to arrivals: names of blocks, tails, tenants, ticks."""

from __future__ import annotations

import pytest

from kvindex.foundation.errors import ConfigError
from sim.block_names import BlockNames
from sim.config import TenantTraffic
from sim.traces.row import TraceHeader
from tests.sim.replaying import arrivals, row


def test_a_trace_block_is_several_engine_blocks_and_the_tail_is_cut() -> None:
    header = TraceHeader(block_size=512, tail="ceil")
    (one,) = arrivals([row(1, 0.0, [7, 8], input_length=700)], header, block_size=16)
    assert len(one.hashes) == 700 // 16
    assert len(set(one.hashes)) == 43


def test_prompts_that_share_an_id_share_its_engine_blocks() -> None:
    header = TraceHeader(block_size=512, tail="ceil")
    rows = [
        row(1, 0.0, [7, 8], input_length=1024),
        row(2, 1.0, [7, 9], input_length=1024),
    ]
    first, second = arrivals(rows, header, block_size=16)
    assert first.hashes[:32] == second.hashes[:32]
    assert not set(first.hashes[32:]) & set(second.hashes[32:])


def test_an_engine_block_of_several_trace_blocks_is_named_by_the_last() -> None:
    rows = [row(1, 0.0, [1, 2, 3, 4]), row(2, 1.0, [1, 2, 5, 6])]
    first, second = arrivals(rows, block_size=32)
    assert first.hashes[0] == second.hashes[0]
    assert first.hashes[1] != second.hashes[1]


def test_tokens_beyond_the_last_id_are_nobody_elses() -> None:
    header = TraceHeader(block_size=64, tail="floor")
    rows = [row(line, 0.0, [5], input_length=100) for line in (1, 2)]
    first, second = arrivals(rows, header, block_size=16)
    assert first.hashes[:4] == second.hashes[:4]
    assert not set(first.hashes[4:]) & set(second.hashes[4:])


def test_sizes_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="block size 24: expected a divisor or a multiple"):
        BlockNames(trace_block_size=64, block_size=24)


def test_named_answers_are_found_by_the_next_turn() -> None:
    rows = [
        row(1, 0.0, [1, 2], input_length=32, output_length=16, output_hash_ids=(3,)),
        row(2, 1.0, [1, 2, 3, 4]),
    ]
    first, second = arrivals(rows)
    assert first.output_hashes == second.hashes[2:3]


def test_isolated_tenants_share_nothing() -> None:
    rows = [row(1, 0.0, [1, 2], tenant="a"), row(2, 1.0, [1, 2], tenant="b")]
    shared = arrivals(rows, isolation="shared")
    apart = arrivals(rows, isolation="tenant")
    assert shared[0].hashes == shared[1].hashes
    assert not set(apart[0].hashes) & set(apart[1].hashes)


def test_a_recorded_salt_narrows_sharing() -> None:
    rows = [
        row(1, 0.0, [1], group="g", client_salt="x"),
        row(2, 1.0, [1], group="g", client_salt="y"),
        row(3, 2.0, [1], group="g", client_salt="x"),
    ]
    first, second, third = arrivals(rows)
    assert first.hashes == third.hashes
    assert first.hashes != second.hashes


def test_twice_a_tenants_traffic_is_its_sessions_again_under_other_blocks() -> None:
    rows = [
        row(1, 0.0, [1, 2], tenant="b", session_id="s"),
        row(2, 5.0, [1, 2, 3], tenant="b", session_id="s"),
        row(3, 6.0, [1, 2], tenant="a"),
    ]
    played = arrivals(rows, tenants={"b": TenantTraffic(scale=2.0)})
    assert [(a.at_s, a.request_id, a.session) for a in played] == [
        (0.0, "line-1", "s"),
        (5.0, "line-2", "s"),
        (6.0, "line-3", None),
        (30.0, "line-1+1", "s+1"),
        (35.0, "line-2+1", "s+1"),
    ]
    assert played[3].hashes == played[4].hashes[:2]
    assert not set(played[0].hashes) & set(played[3].hashes)


def test_half_a_tenants_traffic_leaves_out_whole_sessions() -> None:
    rows = [
        row(line, float(line), [line], tenant="b", session_id=f"s{line % 50}")
        for line in range(1, 201)
    ]
    played = arrivals(rows, tenants={"b": TenantTraffic(scale=0.5)})
    sessions = {a.session for a in played}
    assert 15 <= len(sessions) <= 35
    assert len(played) == 4 * len(sessions)


def test_jitter_spreads_a_tick_up_to_the_next_one() -> None:
    rows = [row(line, 0.0 if line < 5 else 3.0, [line]) for line in range(1, 9)]
    played = arrivals(rows, jitter=True)
    instants = [a.at_s for a in played]
    assert instants == sorted(instants)
    assert len({at_s for at_s in instants[:4] if 0.0 <= at_s < 3.0}) == 4
    assert instants[4:] == [3.0] * 4  # the last tick has no end
    assert instants == [a.at_s for a in arrivals(rows, jitter=True)]
    assert instants != [a.at_s for a in arrivals(rows, jitter=True, seed=1)]


def test_a_trace_without_blocks_needs_the_engines() -> None:
    with pytest.raises(ConfigError, match="give the engine's with --block-size"):
        arrivals([row(1, 0.0, [1], hash_ids=None)], TraceHeader())
