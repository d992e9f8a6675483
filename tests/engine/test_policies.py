"""Policies in the scheduler: urgency, fairness between tenants, bypass, shares, protection."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.executor import execute
from engine.waiting_queue import FairQueue
from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request


def running_ids(core: EngineCore) -> list[str]:
    return [request.request_id for request in core.scheduler.running]


@pytest.mark.fault("engine-23")
def test_an_urgent_request_takes_the_place_of_the_least_urgent_one() -> None:
    core = make_core(max_num_seqs=2, policy="priority")
    low = [make_request(f"low{i}", range(i * 9, i * 9 + 9), priority=5) for i in range(2)]
    for request in low:
        core.add(request)
    result = Run(core)
    result.step()
    core.add(make_request("high", range(100, 109), priority=1, max_tokens=2))
    result.step()
    assert running_ids(core) == ["high", "low0"]
    assert result.to_end().tokens["low1"] == alone(low[1])


@pytest.mark.fault("engine-23")
def test_urgent_requests_preempt_one_request_a_bounded_number_of_times() -> None:
    core = make_core(max_num_seqs=1, policy="priority", max_preemptions=2)
    low = make_request("low", range(9), priority=5, max_tokens=12)
    core.add(low)
    result = Run(core)
    for i in range(4):
        result.step()
        while running_ids(core) != ["low"]:
            result.step()
        core.add(make_request(f"high{i}", [i], priority=0, max_tokens=2))
    result.to_end()
    assert core.counters.preemptions == 2
    assert result.tokens["low"] == alone(low)


@pytest.mark.fault("engine-23")
def test_equal_priorities_keep_the_order_of_arrival() -> None:
    core = make_core(num_blocks=9, policy="priority")
    first = make_request("first", range(3 * BLOCK_SIZE), max_tokens=16)
    second = make_request("second", range(50, 50 + 3 * BLOCK_SIZE), max_tokens=16)
    core.add(first)
    core.add(second)
    result = Run(core)
    while not core.counters.preemptions:
        result.step()
    assert running_ids(core) == ["first"]
    core.add(make_request("third", range(90, 94), max_tokens=1))
    assert result.to_end().tokens["second"] == alone(second)


@pytest.mark.fault("engine-21")
def test_a_victim_is_never_one_that_this_step_has_planned() -> None:
    """Low comes first in arrival, high lacks blocks: the plan holds only what will run."""
    core = make_core(num_blocks=9, policy="priority")
    low = make_request("low", range(3 * BLOCK_SIZE), priority=9, max_tokens=16)
    high = make_request("high", range(50, 50 + 3 * BLOCK_SIZE), priority=1, max_tokens=16)
    core.add(low)
    core.add(high)
    result = Run(core)
    while core.has_work:
        scheduled = core.scheduler.schedule()
        assert set(scheduled.num_scheduled_tokens) <= set(running_ids(core))
        assert not set(scheduled.dropped_request_ids) & set(scheduled.num_scheduled_tokens)
        outputs = core.scheduler.update_from_output(scheduled, execute(core.executor, scheduled))
        for output in outputs:
            result.tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert core.counters.preemptions > 0
    assert result.tokens == {"low": alone(low), "high": alone(high)}


@pytest.mark.fault("engine-24")
def test_a_long_prompt_leaves_half_of_each_step_to_newcomers() -> None:
    core = make_core(num_blocks=200, budget=16, max_prefill_share=0.5)
    core.add(make_request("long", range(200)))
    core.scheduler.schedule()
    core.add(make_request("short", range(210, 214)))
    assert core.scheduler.schedule().num_scheduled_tokens == {"long": 12, "short": 4}


def test_a_long_prompt_takes_the_whole_step_when_nobody_else_wants_it() -> None:
    core = make_core(num_blocks=200, budget=16, max_prefill_share=0.5)
    core.add(make_request("decoding", [1], max_tokens=50))
    core.step()
    core.add(make_request("long", range(200)))
    assert core.scheduler.schedule().num_scheduled_tokens == {"decoding": 1, "long": 15}


def test_small_requests_pass_one_that_does_not_fit_a_bounded_number_of_times() -> None:
    core = make_core(num_blocks=11, max_bypass=2)
    core.add(make_request("holder", range(4 * BLOCK_SIZE), max_tokens=8))
    core.step()
    core.add(make_request("large", range(50, 50 + 8 * BLOCK_SIZE), max_tokens=1))
    for i in range(4):
        core.add(make_request(f"small{i}", [200 + i], max_tokens=1))
    result = Run(core)
    result.step()
    assert sorted(result.finish) == ["small0", "small1"]
    result.to_end()
    finished = list(result.finish)
    assert finished.index("large") < finished.index("small2")


def test_a_request_preempted_often_enough_comes_back_with_all_its_blocks() -> None:
    core = make_core(num_blocks=14, max_preemptions=1)
    old = make_request("old", range(3 * BLOCK_SIZE), max_tokens=24)
    new = make_request("new", range(50, 50 + 3 * BLOCK_SIZE), max_tokens=24)
    core.add(old)
    core.add(new)
    result = Run(core)
    while "old" not in result.finish:
        result.step()
    assert core.counters.preemptions == 1
    while "new" not in running_ids(core):
        result.step()
    table = core.kv_cache.tables["new"]
    assert table.num_held + table.num_reserved == 9
    assert result.to_end().tokens == {"old": alone(old), "new": alone(new)}


def test_backlogged_tenants_are_served_equally_within_one_step() -> None:
    """The VTC bound: two counters differ by at most what one admission and one step charge."""
    core = make_core(num_blocks=64, budget=32, max_num_seqs=2, policy="fair")
    for i in range(40):
        prompt = [(i * 31 + j) % 256 for j in range(20)]
        core.add(make_request(f"a{i}", prompt, tenant="flood", max_tokens=4))
    for i in range(10):
        prompt = [(i * 17 + j) % 256 for j in range(20)]
        core.add(make_request(f"b{i}", prompt, tenant="calm", max_tokens=4))
    queue = core.scheduler.waiting
    assert isinstance(queue, FairQueue)
    result = Run(core)
    while sum(name.startswith("b") for name in result.finish) < 9:
        result.step()
        difference = abs(queue.counter("flood") - queue.counter("calm"))
        assert difference <= 2 * (20 + 4)


def test_a_short_request_of_a_calm_tenant_passes_the_backlog_of_another() -> None:
    core = make_core(num_blocks=64, budget=32, max_num_seqs=1, policy="fair")
    for i in range(100):
        prompt = [(i * 31 + j) % 256 for j in range(20)]
        core.add(make_request(f"a{i}", prompt, tenant="flood", max_tokens=2))
    result = Run(core)
    result.step()
    core.add(make_request("b", [1, 2, 3], tenant="calm", max_tokens=1))
    result.to_end()
    assert list(result.finish).index("b") == 1


def test_cached_tokens_cost_their_tenant_a_tenth() -> None:
    core = make_core(policy="fair")
    queue = core.scheduler.waiting
    assert isinstance(queue, FairQueue)
    prompt = range(4 * BLOCK_SIZE + 1)
    core.add(make_request("a", prompt, tenant="t", max_tokens=1))
    Run(core).to_end()
    assert queue.counter("t") == 17 + 1
    core.add(make_request("b", prompt, tenant="t", max_tokens=1))
    Run(core).to_end()
    assert queue.counter("t") == 18 + 1 + 0.1 * 16 + 1
