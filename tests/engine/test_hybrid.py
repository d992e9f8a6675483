"""Engines with several cache groups: what is hit, held, given back and announced."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.executor import execute
from engine.kv_groups.group import InFlight, resolve_groups
from engine.kv_groups.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVGroupSpec,
    LinearState,
    SlidingWindow,
)
from engine.messages import SnapshotEntry
from engine.transfer import BlockCopy
from kvindex.events import BlockRemoved, BlockStored
from kvindex.foundation.errors import ConfigError
from kvindex.hashing import hash_tokens
from tests.engine.build import BLOCK_SIZE, Run, make_request, run
from tests.engine.hybrid import alone_with, make_hybrid_core


def held_ids(core: EngineCore, request_id: str) -> list[list[int]]:
    """Return the block tables of a running request, 0 for the null block."""
    return core.kv_cache.tables[request_id].block_ids


def step_until_computed(core: EngineCore, request_id: str, num_tokens: int) -> None:
    """Step until so many tokens of a running request are computed."""
    while core.scheduler.requests[request_id].num_computed_tokens < num_tokens:
        core.step()


def test_blocks_outside_the_window_are_given_back_while_the_request_runs() -> None:
    core = make_hybrid_core((FullAttention(), SlidingWindow(window=6)), budget=8)
    core.add(make_request("a", range(24), max_tokens=20))
    step_until_computed(core, "a", 32)
    full, window = held_ids(core, "a")
    assert 0 not in full
    assert [bool(block_id) for block_id in window] == [False] * 5 + [True] * 3
    assert core.kv_cache.pool.num_usable - core.kv_cache.pool.num_free == 8 + 3


def test_a_state_group_keeps_the_last_state_only() -> None:
    core = make_hybrid_core((LinearState(block_size=8),), budget=64)
    core.add(make_request("a", range(40), max_tokens=30))
    core.step()
    assert [bool(b) for b in held_ids(core, "a")[0]] == [False] * 4 + [True]
    step_until_computed(core, "a", 57)
    assert [bool(b) for b in held_ids(core, "a")[0]] == [False] * 6 + [True] * 2


def test_a_prompt_leaves_a_state_at_its_last_full_block() -> None:
    core = make_hybrid_core((FullAttention(), LinearState(block_size=8)))
    first = make_request("a", range(30))
    assert run(core, first).cached["a"] == 0
    second = make_request("b", [*range(24), 99, 98])
    result = run(core, second)
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(core.executor.info.kv_groups, second)


def test_a_state_has_one_hash_however_many_units_its_block_covers() -> None:
    core = make_hybrid_core((FullAttention(block_size=8), LinearState(block_size=8)))
    request = make_request("a", range(28), max_tokens=1)
    run(core, request)
    chain = hash_tokens(range(28), core.config.hash_scheme)
    assert set(core.kv_cache.pool.cached_hashes(0)) == set(chain)
    assert set(core.kv_cache.pool.cached_hashes(1)) == {chain[5]}


def test_nobody_waits_for_a_hash_that_no_group_keeps() -> None:
    """The writer keeps one state of its prompt; the sibling starts before the writer is done."""
    core = make_hybrid_core((LinearState(),))
    core.add(make_request("writer", range(30), max_tokens=50))
    core.add(make_request("sibling", [*range(10), 99], max_tokens=1))
    result = Run(core)
    result.step()
    result.step()
    assert result.finish == {"sibling": "length"}


def test_where_requests_part_the_second_leaves_a_state_for_the_third() -> None:
    core = make_hybrid_core((FullAttention(), LinearState(block_size=8)))
    requests = [make_request(f"r{i}", [*range(16), *[100 + i] * 14]) for i in range(3)]
    assert [run(core, r).cached[r.request_id] for r in requests] == [0, 0, 16]


def cached_states(core: EngineCore) -> list[int]:
    """Return after how many of the tokens 0, 1, 2... a state is cached in group 1."""
    chain = hash_tokens(range(BLOCK_SIZE * 30), core.config.hash_scheme)
    lengths = {block_hash: (i + 1) * BLOCK_SIZE for i, block_hash in enumerate(chain)}
    return sorted(lengths[h] for h in core.kv_cache.pool.cached_hashes(1) if h in lengths)


def test_a_long_prompt_leaves_the_state_at_its_end_not_one_for_every_chunk() -> None:
    core = make_hybrid_core((FullAttention(), LinearState()), budget=8)
    run(core, make_request("a", range(102), max_tokens=1))
    assert cached_states(core) == [100]
    assert core.kv_cache.pool.num_cached_hashes == 25 + 1
    assert run(core, make_request("b", range(102))).cached["b"] == 100


def test_while_a_prompt_is_computed_its_latest_state_is_cached() -> None:
    core = make_hybrid_core((FullAttention(), LinearState()), budget=10)
    core.add(make_request("a", range(102), max_tokens=1))
    found = []
    for _ in range(4):
        core.step()
        found.append(cached_states(core))
    assert found == [[8], [20], [28], [40]]


def test_an_answer_leaves_the_state_at_its_last_full_block() -> None:
    core = make_hybrid_core((FullAttention(), LinearState()))
    first = make_request("a", range(10), max_tokens=33)
    answer = run(core, first).tokens["a"]
    assert cached_states(core) == [8]
    assert len(list(core.kv_cache.pool.cached_hashes(1))) == 2
    follow_up = make_request("b", [*range(10), *answer, 7, 8])
    assert run(core, follow_up).cached["b"] == 40
    assert run(core, make_request("c", [*range(10), 9])).cached["c"] == 8


def test_states_that_are_replaced_are_told_as_stored_and_removed() -> None:
    core = make_hybrid_core((LinearState(),), budget=8)
    run(core, make_request("a", range(22), max_tokens=1))
    chain = hash_tokens(range(22), core.config.hash_scheme)
    told = [
        (type(event), event.block_hashes[0])
        for event in core.take_events()
        if isinstance(event, BlockStored | BlockRemoved)
    ]
    assert told == [
        (BlockStored, chain[1]),
        (BlockStored, chain[3]),
        (BlockRemoved, chain[1]),
        (BlockStored, chain[4]),
        (BlockRemoved, chain[3]),
    ]


def test_a_request_leaves_a_state_where_those_that_wait_part_from_it() -> None:
    """However its prompt is cut into chunks."""
    groups: tuple[KVGroupSpec, ...] = (FullAttention(), LinearState())
    for budget in (5, 16, 64):
        core = make_hybrid_core(groups, budget=budget)
        requests = [
            make_request("a", range(60)),
            make_request("b", [*range(20), *[99] * 8]),
            make_request("c", [*range(20), *[98] * 8]),
        ]
        result = run(core, *requests)
        assert result.cached == {"a": 0, "b": 20, "c": 20}
        assert result.tokens == {r.request_id: alone_with(groups, r) for r in requests}
        assert cached_states(core) == [20, 60]
        core.add(make_request("d", range(60)))
        live = core.scheduler.requests["d"]
        assert core.kv_cache.prefixes.partings(live, 0, 60) == set()


def test_a_preempted_request_goes_on_from_its_latest_state() -> None:
    core = make_hybrid_core((FullAttention(), LinearState()), budget=8)
    request = make_request("a", range(50), max_tokens=6)
    core.add(request)
    step_until_computed(core, "a", 24)
    core.scheduler.withdraw_steps()
    core.step()
    assert core.scheduler.requests["a"].num_computed_tokens == 32
    result = Run(core).to_end()
    assert result.tokens["a"] == alone_with(core.executor.info.kv_groups, request)


def test_where_requests_part_within_a_coarse_block_is_seen() -> None:
    core = make_hybrid_core((FullAttention(block_size=48), LinearState()))
    requests = [make_request(f"r{i}", [*range(28), *[100 + i] * 14]) for i in range(3)]
    assert [run(core, r).cached[r.request_id] for r in requests] == [0, 0, 28]


@pytest.mark.fault("engine-37")
def test_a_state_that_is_being_written_delays_its_reader_by_a_step() -> None:
    groups: tuple[KVGroupSpec, ...] = (FullAttention(), LinearState(block_size=8))
    core = make_hybrid_core(groups)
    requests = [make_request(name, [*range(24), 90 + i]) for i, name in enumerate("ab")]
    for request in requests:
        core.add(request)
    first = core.scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 25}
    core.scheduler.update_from_output(first, execute(core.executor, first))
    second = core.scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1, "b": 1}
    assert second.num_computed_tokens["b"] == 24
    output = execute(core.executor, second)
    first_token = alone_with(groups, requests[1])[0]
    assert output.sampled_token_ids["b"] == [first_token]


@pytest.mark.fault("engine-38")
def test_coarse_and_fine_blocks_share_a_fine_hit_granularity() -> None:
    """Blocks of 16 and 64 tokens; the prompt is shorter than their common multiple."""
    groups: tuple[KVGroupSpec, ...] = (FullAttention(block_size=16), FullAttention(block_size=64))
    core = make_hybrid_core(groups, block_size=16)
    prompt = range(40)
    run(core, make_request("a", prompt))
    second = make_request("b", prompt)
    result = run(core, second)
    assert result.cached["b"] == 32
    assert result.tokens["b"] == alone_with(groups, second)


@pytest.mark.fault("engine-38")
def test_a_drafter_group_costs_one_block_of_the_hit() -> None:
    groups: tuple[KVGroupSpec, ...] = (
        FullAttention(block_size=64),
        FullAttention(block_size=16, drafter=True),
    )
    core = make_hybrid_core(groups, block_size=16)
    prompt = [i % 256 for i in range(150)]
    assert [run(core, make_request(name, prompt)).cached[name] for name in "ab"] == [0, 128]


def test_the_tail_of_a_coarse_block_is_copied_not_shared() -> None:
    core = make_hybrid_core((FullAttention(block_size=16), SlidingWindow(window=5)))
    running = make_request("a", range(23), max_tokens=20)
    core.add(running)
    core.step()
    core.step()
    other = make_request("b", [*range(20), 77, 78])
    core.add(other)
    scheduled = core.scheduler.schedule()
    coarse = held_ids(core, "a")[0], held_ids(core, "b")[0]
    assert coarse[0][0] == coarse[1][0]
    assert scheduled.transfers == [BlockCopy(coarse[0][1], coarse[1][1])]
    assert scheduled.num_computed_tokens["b"] == 20
    execute(core.executor, scheduled)


def test_a_tail_that_is_the_last_free_block_is_taken_over_in_place() -> None:
    groups: tuple[KVGroupSpec, ...] = (FullAttention(block_size=16), FullAttention())
    core = make_hybrid_core(groups, num_blocks=1 + 2 + 8)
    prompt = range(24)
    run(core, make_request("a", prompt, max_tokens=1))
    assert core.max_model_len == 32
    second = make_request("b", [*prompt, 99], max_tokens=7)
    result = run(core, second)
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(groups, second)


def test_no_tail_is_overwritten_before_it_is_copied() -> None:
    """Only the blocks of the hit are free, the tail of the second group in front."""
    window = SlidingWindow(window=100, block_size=16)
    groups: tuple[KVGroupSpec, ...] = (FullAttention(block_size=16), window)
    core = make_hybrid_core(groups, num_blocks=5)
    prompt = range(24)
    core.add(make_request("a", prompt, max_tokens=1))
    core.step()
    pool = core.kv_cache.pool
    first_tail, second_tail, *heads = list(pool.free_queue)
    assert (first_tail.group, second_tail.group) == (0, 1)
    for block in (second_tail, first_tail, *heads):
        pool.refresh(block)
    second = make_request("b", [*prompt, 99], max_tokens=7)
    result = run(core, second)
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(groups, second)


def test_a_group_that_is_not_causal_is_not_cached_but_the_others_are() -> None:
    groups: tuple[KVGroupSpec, ...] = (FullAttention(), FullAttention(causal=False))
    core = make_hybrid_core(groups)
    run(core, make_request("a", [*range(24), 60]))
    second = make_request("b", [*range(24), 61])
    result = run(core, second)
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(groups, second)
    assert {group for group, _ in core.kv_cache.pool.cached_keys()} == {0}


def test_only_groups_that_are_not_causal_means_no_hit_at_all() -> None:
    groups: tuple[KVGroupSpec, ...] = (FullAttention(causal=False),)
    core = make_hybrid_core(groups)
    results = [run(core, make_request(name, range(24))) for name in "ab"]
    assert [r.cached for r in results] == [{"a": 0}, {"b": 0}]
    assert core.kv_cache.pool.num_cached_hashes == 0


def test_cross_attention_takes_its_blocks_once_and_for_good() -> None:
    core = make_hybrid_core((FullAttention(), CrossAttention(num_tokens=10)), budget=8)
    core.add(make_request("a", range(20), max_tokens=9))
    core.step()
    encoder = held_ids(core, "a")[1]
    assert len(encoder) == 3
    step_until_computed(core, "a", 24)
    assert held_ids(core, "a")[1] == encoder
    assert {group for group, _ in core.kv_cache.pool.cached_keys()} == {0}


def test_events_and_snapshots_name_the_group() -> None:
    core = make_hybrid_core((FullAttention(), SlidingWindow(window=6)))
    run(core, make_request("a", range(2 * BLOCK_SIZE), max_tokens=1))
    stored = core.take_events()
    hashes = list(core.kv_cache.pool.cached_hashes(0))
    assert stored == [
        BlockStored(
            block_hashes=[*hashes],
            parent_block_hash=None,
            token_ids=[],
            block_size=BLOCK_SIZE,
            group_idx=group,
        )
        for group in (0, 1)
    ]
    assert core.snapshot_entries() == [SnapshotEntry(h, group) for group in (0, 1) for h in hashes]
    core.kv_cache.pool.allocate(core.kv_cache.pool.num_free)
    removed = [event for event in core.take_events() if isinstance(event, BlockRemoved)]
    assert {(event.group_idx, h) for event in removed for h in event.block_hashes} == {
        (group, h) for group in (0, 1) for h in hashes
    }


def test_eviction_shortens_the_prefix_in_every_group_alike() -> None:
    """Two blocks were never used; of those with contents, two of each group go."""
    core = make_hybrid_core((FullAttention(), SlidingWindow(window=100)), num_blocks=15)
    run(core, make_request("a", range(24), max_tokens=1))
    core.kv_cache.pool.free(core.kv_cache.pool.allocate(6))
    assert run(core, make_request("b", range(24), max_tokens=1)).cached["b"] == 16


def test_the_longest_sequence_counts_what_each_group_holds_at_once() -> None:
    """6 window tokens and a step of 8 take 5 blocks at most; full attention gets the other 20."""
    core = make_hybrid_core((FullAttention(), SlidingWindow(window=6)), num_blocks=26, budget=8)
    assert core.max_model_len == 20 * BLOCK_SIZE
    request = make_request("a", [i % 256 for i in range(70)], max_tokens=10)
    assert len(run(core, request).tokens["a"]) == 10


def test_a_model_of_windows_alone_has_no_longest_sequence() -> None:
    core = make_hybrid_core((SlidingWindow(window=6),), num_blocks=8, budget=8)
    assert core.kv_cache.max_num_tokens(8) is None
    request = make_request("a", [i % 256 for i in range(200)], max_tokens=3)
    assert run(core, request).tokens["a"] == alone_with((SlidingWindow(window=6),), request)


def test_a_reserve_gets_back_what_leaves_the_window() -> None:
    groups: tuple[KVGroupSpec, ...] = (FullAttention(), SlidingWindow(window=6))
    core = make_hybrid_core(groups, num_blocks=24, budget=8, max_preemptions=1)
    requests = [
        make_request(name, range(i * 60, i * 60 + 16), max_tokens=24)
        for i, name in enumerate("abc")
    ]
    for request in requests:
        core.add(request)
    result, promised = Run(core), set()
    while core.has_work:
        result.step()
        reserves = [t for t in core.kv_cache.tables.values() if t.has_reserve]
        promised |= {table.num_held + table.num_reserved for table in reserves}
    assert promised == {10 + 5}
    assert result.tokens == {r.request_id: alone_with(groups, r) for r in requests}
    assert core.kv_cache.num_reserved == 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((FullAttention(), SlidingWindow(window=0)), r"kv_groups\[1\]: span 0 of a window group"),
        ((FullAttention(block_size=6),), r"kv_groups\[0\].block_size 6: expected a multiple of"),
        ((CrossAttention(num_tokens=5),), "at least one group that grows"),
        ((ChunkedLocal(chunk=0),), r"kv_groups\[0\]: span 0 of a chunk group"),
    ],
)
def test_groups_that_cannot_work_are_refused_by_name(
    groups: tuple[KVGroupSpec, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_hybrid_core(groups)


def test_a_windowed_group_holds_what_steps_in_flight_may_read() -> None:
    (group,) = resolve_groups((SlidingWindow(window=9),), hash_block_size=4)
    held = [
        group.max_held_blocks(1000, InFlight(max_step_tokens=16, num_steps=n)) for n in (1, 2, 3)
    ]
    assert held == [7, 11, 15]
    assert group.max_held_blocks(1000, InFlight()) == 250


def test_steps_in_flight_keep_their_window() -> None:
    """What lies before the window of a step that has not returned may still be read."""
    core = make_hybrid_core((SlidingWindow(window=4),), budget=8)
    core.add(make_request("a", range(24), max_tokens=1))
    result = Run(core)
    first = core.scheduler.schedule()
    second = core.scheduler.schedule()
    assert 0 not in held_ids(core, "a")[0]
    core.scheduler.update_from_output(first, execute(core.executor, first))
    core.scheduler.schedule()
    assert [bool(b) for b in held_ids(core, "a")[0]] == [False] + [True] * 5
    core.scheduler.update_from_output(second, execute(core.executor, second))
    assert result.tokens == {}
