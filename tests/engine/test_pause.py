"""Pausing: a drain lets what runs finish, a full pause freezes it; nothing is lost either way."""

from __future__ import annotations

import pytest

from engine.messages import PauseMode
from tests.engine.build import Run, alone, make_core, make_request


def test_a_drain_finishes_what_runs_and_admits_nothing_new() -> None:
    core = make_core()
    old, new = make_request("old", range(10)), make_request("new", range(50, 60))
    core.add(old)
    result = Run(core)
    result.step()
    core.pause("new")
    core.add(new)
    result.to_end()
    assert result.tokens == {"old": alone(old)}
    assert core.stats().num_waiting == 1
    core.resume()
    assert result.to_end().tokens == {"old": alone(old), "new": alone(new)}


def test_a_drain_takes_preempted_requests_to_their_end() -> None:
    core = make_core()
    request = make_request("a", range(10), max_tokens=8)
    core.add(request)
    result = Run(core)
    result.step()
    core.pause("new")
    assert core.reset_prefix_cache(preempt_running=True)
    assert core.has_work
    assert result.to_end().tokens["a"] == alone(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_full_pause_brings_home_what_is_in_flight_and_freezes_the_rest(depth: int) -> None:
    core = make_core(async_depth=depth)
    request = make_request("a", range(10), max_tokens=8)
    core.add(request)
    result = Run(core)
    for _ in range(3):
        result.step()
    core.pause("all")
    result.to_end()
    assert core.scheduler.num_in_flight == 0
    assert core.stats().pause_mode == "all"
    assert core.stats().num_running == 1
    core.resume()
    assert result.to_end().tokens["a"] == alone(request)


def test_an_abort_while_paused_frees_blocks_at_once() -> None:
    core = make_core()
    core.add(make_request("a", range(10)))
    core.step()
    core.pause("all")
    core.abort(["a"])
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable
    core.resume()
    again = make_request("a", range(30, 40))
    core.add(again)
    assert Run(core).to_end().tokens["a"] == alone(again)


@pytest.mark.parametrize("mode", ["new", "all"])
def test_an_urgent_newcomer_preempts_nobody_while_paused(mode: PauseMode) -> None:
    core = make_core(max_num_seqs=1, policy="priority")
    low = make_request("low", range(10), max_tokens=6, priority=5)
    core.add(low)
    result = Run(core)
    result.step()
    core.pause(mode)
    core.add(make_request("high", range(50, 60), priority=0))
    result.to_end()
    assert core.counters.preemptions == 0
    core.resume()
    assert result.to_end().tokens["low"] == alone(low)
