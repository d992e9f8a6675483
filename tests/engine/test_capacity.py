"""A pool that shrinks and grows while it serves: what is given up, and who is displaced."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.core import EngineCore
from engine.executor import OutOfDeviceMemoryError, execute
from engine.frontend.errors import RequestError
from engine.invariants import check_integrity, check_pool
from engine.kv_groups.spec import FullAttention, SlidingWindow
from engine.messages import EngineOutput
from engine.scripted_executor import ScriptedExecutor
from kvindex.events import BlockRemoved
from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme, hash_tokens
from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request, run
from tests.engine.hybrid import alone_with, make_hybrid_core
from tests.engine.test_host_tier import OTHER, cache_chain

CHAIN = hash_tokens(range(40), HashScheme(block_size=4))


def limit_device(core: EngineCore, num_blocks: int | None) -> None:
    """Leave so many blocks of the device to the engine."""
    assert isinstance(core.executor, ScriptedExecutor)
    core.executor.max_device_blocks = num_blocks


def test_blocks_beyond_the_size_are_not_handed_out_until_the_pool_grows_again() -> None:
    pool = BlockPool(8, block_size=4)
    pool.shrink(4, closed_groups=[0])
    assert [block.block_id for block in pool.allocate(3)] == [1, 2, 3]
    assert (pool.num_free, pool.num_usable) == (0, 3)
    check_pool(pool)
    pool.grow(8)
    assert [block.block_id for block in pool.allocate(4)] == [4, 5, 6, 7]
    check_pool(pool)


def test_what_descends_from_a_block_of_the_slab_goes_with_it_children_first() -> None:
    """Blocks 1, 2, 5, 4 hold a chain; 5 is given up, and 4 with it, though it stays."""
    pool = BlockPool(6, block_size=4)
    taken = {block.block_id: block for block in pool.allocate(5)}
    chain = [taken[i] for i in (1, 2, 5, 4)]
    for i, block in enumerate(chain):
        pool.commit(block, CHAIN[i], CHAIN[i - 1] if i else None)
    pool.commit(taken[3], OTHER[0], None)
    pool.free([*chain[::-1], taken[3]])
    pool.take_events()
    pool.shrink(5, closed_groups=[0])
    assert pool.take_events() == [
        BlockRemoved(block_hashes=[CHAIN[3], CHAIN[2]], medium="GPU", group_idx=0)
    ]
    assert [pool.get_cached(h) for h in CHAIN[:4]] == [taken[1], taken[2], None, None]
    assert pool.get_cached(OTHER[0]) is taken[3]
    assert next(iter(pool.free_queue)) is taken[4]
    check_pool(pool)


def test_a_copy_that_stays_keeps_the_descendants() -> None:
    pool = BlockPool(6, block_size=4)
    copy, child, _, _, original = pool.allocate(5)
    for block in (original, copy):
        pool.commit(block, CHAIN[0], None)
    pool.commit(child, CHAIN[1], CHAIN[0])
    pool.free([original])
    pool.take_events()
    pool.shrink(5, closed_groups=[0])
    assert pool.take_events() == []
    assert pool.get_cached(CHAIN[1]) is child
    check_pool(pool)


def test_groups_that_are_not_closed_keep_what_descends_from_a_lost_block() -> None:
    pool = BlockPool(3, block_size=4)
    child, parent = pool.allocate(2)
    pool.commit(parent, CHAIN[0], None)
    pool.commit(child, CHAIN[1], CHAIN[0])
    pool.free([child, parent])
    pool.shrink(2, closed_groups=[])
    assert pool.get_cached(CHAIN[1]) is child
    assert pool.get_cached(CHAIN[0]) is None


def test_the_host_tier_takes_what_a_slab_held() -> None:
    pool = BlockPool(6, block_size=4, num_host_blocks=8)
    cache_chain(pool, CHAIN[:5])
    pool.shrink(3, closed_groups=[0])
    assert pool.host is not None
    assert set(pool.host.map.hashes(0)) == set(CHAIN[2:5])
    assert [pool.get_cached(h) is None for h in CHAIN[:5]] == [False, False, True, True, True]
    check_pool(pool)


def test_a_block_in_use_cannot_be_retired() -> None:
    pool = BlockPool(3, block_size=4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="in use cannot be retired"):
        pool.shrink(2, closed_groups=[0])


@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_shrinking_preempts_those_in_the_slab_and_changes_no_token(async_depth: int) -> None:
    core = make_core(num_blocks=32, slab_blocks=8, async_depth=async_depth)
    requests = [make_request(f"r{i}", range(i * 20, i * 20 + 20), max_tokens=12) for i in range(3)]
    result = Run(core)
    for request in requests:
        core.add(request)
    result.step()
    held = {r: core.kv_cache.tables[r].block_ids[0] for r in ("r0", "r1", "r2")}
    displaced = [r for r, ids in held.items() if max(ids) >= 8]
    assert displaced == ["r1", "r2"]
    assert core.resize(8) == []
    check_integrity(core.scheduler)
    assert [r.request_id for r in core.scheduler.running] == ["r0"]
    assert core.kv_cache.pool.num_usable == 7
    result.to_end()
    assert result.finish == dict.fromkeys(("r0", "r1", "r2"), "length")
    limit = core.max_model_len
    for request in requests:
        assert result.tokens[request.request_id] == alone(request)[: limit - 20]


def test_a_grown_pool_serves_as_before() -> None:
    core = make_core(num_blocks=32, slab_blocks=8)
    core.resize(16)
    assert (core.kv_cache.pool.num_usable, core.max_model_len) == (15, 15 * BLOCK_SIZE)
    core.resize(32)
    assert (core.kv_cache.pool.num_usable, core.max_model_len) == (31, 31 * BLOCK_SIZE)
    request = make_request("a", range(80), max_tokens=20)
    assert run(core, request).tokens["a"] == alone(request)


@pytest.mark.parametrize(("asked", "size"), [(31, 24), (24, 24), (9, 8), (0, 8), (99, 32)])
def test_sizes_are_whole_slabs_within_what_there_is(asked: int, size: int) -> None:
    core = make_core(num_blocks=32, slab_blocks=8)
    core.resize(asked)
    assert core.kv_cache.pool.num_blocks == size


def test_the_smallest_size_holds_a_sequence_in_every_group() -> None:
    groups = (FullAttention(), SlidingWindow(window=6))
    core = make_hybrid_core(groups, num_blocks=32, slab_blocks=2, budget=8)
    core.resize(0)
    assert core.kv_cache.pool.num_blocks == 4
    request = make_request("a", [7, 8], max_tokens=1)
    assert run(core, request).tokens["a"] == alone_with(groups, request)


def test_a_pool_that_holds_no_sequence_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no sequence of two tokens"):
        make_hybrid_core((FullAttention(), FullAttention()), num_blocks=2)


def test_requests_that_fit_no_more_end_and_say_why() -> None:
    core = make_core(num_blocks=32, slab_blocks=8, max_num_seqs=1)
    core.add(make_request("answering", range(40), max_tokens=30))
    core.add(make_request("waiting", range(100, 150), max_tokens=4))
    core.add(make_request("short", range(10), max_tokens=2))
    core.step()
    ends = core.resize(8)
    assert ends == [
        EngineOutput(request_id="answering", finish_reason="length"),
        EngineOutput(
            request_id="waiting",
            finish_reason="error",
            error="the KV cache shrank: 50 tokens do not fit any more, only 27 do",
            error_kind="overloaded",
        ),
    ]
    check_integrity(core.scheduler)
    assert Run(core).to_end().finish == {"short": "length"}
    with pytest.raises(RequestError, match="at most 27 leave room"):
        core.add(make_request("late", range(28)))


def test_reserved_blocks_stay_free_when_the_pool_shrinks() -> None:
    core = make_core(num_blocks=33, slab_blocks=4, max_preemptions=0)
    result = Run(core)
    request = make_request("reserving", range(8), max_tokens=100)
    core.add(request)
    result.step()
    assert core.kv_cache.num_reserved > 20
    core.resize(16)
    check_integrity(core.scheduler)
    assert core.scheduler.running == []
    result.to_end()
    assert result.tokens["reserving"] == alone(request)[: core.max_model_len - 8]


def test_the_executor_hears_of_a_new_size_even_when_nothing_runs() -> None:
    core = make_core(num_blocks=32, slab_blocks=8)
    assert not core.has_work
    core.resize(16)
    assert core.has_work
    step = core.scheduler.schedule()
    assert (step.num_blocks, step.num_scheduled_tokens) == (16, {})
    core.scheduler.update_from_output(step, execute(core.executor, step))
    assert not core.has_work


def test_a_step_in_flight_may_write_to_a_slab_that_is_given_up_and_taken_back() -> None:
    """The step is computed before the executor learns of either change."""
    core = make_core(num_blocks=32, slab_blocks=8, async_depth=2)
    request = make_request("a", range(40), max_tokens=12)
    core.add(request)
    in_flight = [core.scheduler.schedule()]
    core.resize(8 + 8)
    core.resize(32)
    other = make_request("b", range(100, 140), max_tokens=1)
    core.add(other)
    in_flight.append(core.scheduler.schedule())
    tokens: dict[str, list[int]] = {}
    for step in in_flight:
        core.executor.submit(step)
    for step in in_flight:
        for output in core.scheduler.update_from_output(step, core.executor.collect()):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens["b"] == alone(other)
    assert tokens["a"] == alone(request)[: len(tokens["a"])]


# Out of memory


@pytest.mark.parametrize("async_depth", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_out_of_memory_shrinks_the_pool_and_changes_no_token(
    async_depth: int, num_steps: int
) -> None:
    core = make_core(num_blocks=40, slab_blocks=8, async_depth=async_depth, num_host_blocks=16)
    requests = [make_request(f"r{i}", range(i * 20, i * 20 + 18), max_tokens=8) for i in range(3)]
    result = Run(core)
    for request in requests:
        core.add(request)
    for _ in range(num_steps):
        result.step()
    limit_device(core, 24)
    result.to_end()
    assert core.kv_cache.pool.num_blocks == 24
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


def test_memory_that_comes_back_is_used_after_a_resize() -> None:
    core = make_core(num_blocks=32, slab_blocks=8)
    limit_device(core, 16)
    run(core, make_request("a", range(20)))
    limit_device(core, None)
    core.resize(32)
    request = make_request("b", range(100), max_tokens=4)
    assert run(core, request).tokens["b"] == alone(request)


def test_out_of_memory_with_no_slab_to_give_up_ends_the_engine() -> None:
    core = make_core(num_blocks=16, slab_blocks=8)
    limit_device(core, 4)
    core.add(make_request("a", range(10)))
    core.step()
    assert core.kv_cache.pool.num_blocks == 8
    with pytest.raises(OutOfDeviceMemoryError, match="8 blocks do not fit, 4 do"):
        core.step()


def test_what_a_withdrawn_step_was_to_write_is_never_found() -> None:
    core = make_core(num_blocks=32, slab_blocks=8, async_depth=1)
    core.add(make_request("a", range(20)))
    limit_device(core, 24)
    core.step()
    core.step()
    assert core.kv_cache.pool.num_cached_hashes == 0
    assert not core.kv_cache.is_pending(hash_tokens(range(4), core.config.hash_scheme)[0])
    check_integrity(core.scheduler)


def test_a_resize_that_is_in_flight_is_not_taken_for_the_end_of_a_shortage() -> None:
    """The step that runs out of memory comes before the one that tells of the new size."""
    core = make_core(num_blocks=64, slab_blocks=4, async_depth=2)
    request = make_request("a", range(20), max_tokens=30)
    core.add(request)
    result = Run(core)
    for _ in range(3):
        result.step()
    core.resize(48)
    executor = core.executor
    assert isinstance(executor, ScriptedExecutor)
    executor.max_device_blocks = 40
    assert result.to_end().tokens["a"] == alone(request)
    assert core.kv_cache.pool.num_blocks == 40
