"""Steps scheduled ahead: the same tokens, nothing lost, nothing written where another reads."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.executor import execute
from tests.engine.build import (
    BLOCK_SIZE,
    Run,
    alone,
    make_core,
    make_request,
    pressing_requests,
    run,
)

each_depth = pytest.mark.parametrize("depth", [1, 2])


def _in_flight(core: EngineCore) -> int:
    return core.scheduler.num_in_flight


@each_depth
def test_steps_are_scheduled_before_the_ones_before_them_return(depth: int) -> None:
    core = make_core(async_depth=depth)
    core.add(make_request("a", range(10), max_tokens=8))
    result = Run(core)
    for num_steps in range(1, depth + 1):
        assert result.step() == []
        assert _in_flight(core) == num_steps
    (first,) = result.step()
    assert first.token_ids == alone(make_request("a", range(10), max_tokens=1))
    assert _in_flight(core) == depth


@each_depth
def test_a_request_is_not_scheduled_beyond_its_certain_end(depth: int) -> None:
    core = make_core(async_depth=depth)
    request = make_request("a", range(10), max_tokens=3)
    core.add(request)
    scheduled = [core.scheduler.schedule() for _ in range(5)]
    assert [s.total_scheduled_tokens for s in scheduled] == [10, 1, 1, 0, 0]
    outputs = [
        output
        for step in scheduled
        for output in core.scheduler.update_from_output(step, execute(core.executor, step))
    ]
    assert [t for output in outputs for t in output.token_ids] == alone(request)
    assert outputs[-1].finish_reason == "length"


@each_depth
def test_the_model_length_ends_a_request_that_is_ahead(depth: int) -> None:
    core = make_core(async_depth=depth, max_model_len=13)
    result = run(core, make_request("a", range(10), max_tokens=50))
    assert result.tokens["a"] == alone(make_request("a", range(10), max_tokens=3))
    assert result.finish["a"] == "length"


@each_depth
def test_what_was_computed_behind_a_stop_token_is_dropped(depth: int) -> None:
    free = alone(make_request("a", range(10), max_tokens=12))
    stop = free[4]
    core = make_core(async_depth=depth)
    result = run(core, make_request("a", range(10), max_tokens=12, stop_token_ids=(stop,)))
    assert result.tokens["a"] == free[: free.index(stop) + 1]
    assert result.finish["a"] == "stop"
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


@each_depth
def test_blocks_that_outputs_complete_are_cached_as_without_steps_ahead(depth: int) -> None:
    """The last block is completed by a token that was not known when its step was planned."""
    for max_tokens in range(1, 2 * BLOCK_SIZE + 2):
        request = make_request("a", range(10), max_tokens=max_tokens)
        cached = []
        for async_depth in (0, depth):
            core = make_core(async_depth=async_depth)
            run(core, request)
            cached.append(sorted(core.kv_cache.pool.cached_hashes()))
        assert cached[0] == cached[1]


@pytest.mark.fault("engine-26")
@each_depth
@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("num_preemptions", [1, 2])
def test_a_request_preempted_with_outputs_in_flight_keeps_each_of_them(
    depth: int, num_steps: int, num_preemptions: int
) -> None:
    core = make_core(async_depth=depth)
    requests = [make_request(f"r{i}", range(20 * i, 20 * i + 9), max_tokens=9) for i in range(3)]
    for request in requests:
        core.add(request)
    result = Run(core)
    for _ in range(num_preemptions):
        for _ in range(num_steps):
            result.step()
        assert core.reset_prefix_cache(preempt_running=True)
    result.to_end()
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    assert all(not r.num_placeholders for r in core.scheduler.requests.values())


@pytest.mark.fault("engine-26")
@each_depth
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_pressure_with_steps_ahead_gives_the_tokens_of_each_request_alone(
    depth: int, policy: str
) -> None:
    core = make_core(
        num_blocks=20,
        budget=12,
        max_num_seqs=6,
        async_depth=depth,
        policy=policy,
        max_preemptions=2,
    )
    requests = pressing_requests(60, seed=5)
    result = run(core, *requests)
    assert core.counters.preemptions > 0
    assert result.tokens == {r.request_id: alone(r) for r in requests}


@pytest.mark.fault("engine-2")
@each_depth
def test_an_abort_before_its_steps_return_leaves_no_hash_and_no_output(depth: int) -> None:
    core = make_core(async_depth=depth)
    core.add(make_request("a", range(3 * BLOCK_SIZE)))
    result = Run(core)
    for _ in range(depth):
        result.step()
    core.abort(["a"])
    again = make_request("a", range(100, 120))
    core.add(again)
    result.to_end()
    assert result.tokens == {"a": alone(again)}
    chain = [h for h in core.scheduler.pool.cached_hashes()]
    assert len(chain) == (20 + 4 - 1) // BLOCK_SIZE


@each_depth
def test_a_core_has_work_until_the_last_step_has_returned(depth: int) -> None:
    core = make_core(async_depth=depth)
    core.add(make_request("a", range(10)))
    core.step()
    core.abort(["a"])
    assert core.has_work
    assert core.step() == []
    assert not core.has_work
    assert _in_flight(core) == 0
