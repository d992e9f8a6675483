"""Measured rates, and the step budget that follows from them."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import TenantStats
from engine.output import ModelRunnerOutput
from engine.scripted_executor import ScriptedExecutor, StepCost
from engine.stats import EngineCounters, Evictions, StepRates
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import Run, make_core, make_request, run


def test_rates_come_from_steps_of_one_kind() -> None:
    rates = StepRates()
    rates.observe(num_prefill_tokens=100, num_decode_tokens=0, step_s=0.5)
    rates.observe(num_prefill_tokens=0, num_decode_tokens=4, step_s=0.1)
    rates.observe(num_prefill_tokens=2, num_decode_tokens=4, step_s=9.0)
    assert (rates.prefill_tokens_per_s, rates.decode_tokens_per_s) == (200.0, 40.0)
    assert rates.busy_s == 9.6


def test_a_step_never_shrinks_below_a_useful_chunk() -> None:
    rates = StepRates(prefill_tokens_per_s=10.0)
    assert rates.tokens_within(0.5) == 32
    assert rates.tokens_within(0.0) is None
    assert StepRates().tokens_within(0.5) == 32


def test_steps_of_a_slow_engine_stay_near_the_bound() -> None:
    clock = VirtualClock()
    executor = ScriptedExecutor(
        num_blocks=200,
        block_size=16,
        cost=StepCost(per_prefill_token_s=0.005),
        sleep=clock.advance,
    )
    core = EngineCore(EngineConfig(max_step_s=0.5), executor, clock)
    core.add(make_request("a", [1] * 1000, max_tokens=1))
    durations = []
    run = Run(core)
    while core.has_work:
        before = clock.monotonic()
        run.step()
        durations.append(clock.monotonic() - before)
    assert durations[0] == 0.16
    assert all(0.49 < d < 0.51 for d in durations[1:-1])


def test_each_tenant_has_its_part_of_every_total() -> None:
    core = make_core()
    core.add(make_request("a1", range(20), tenant="a", max_tokens=3))
    core.add(make_request("b", range(50, 60), tenant="b", max_tokens=2))
    core.add(make_request("nobody", range(80, 85), max_tokens=1))
    run = Run(core)
    run.step()
    assert core.tenant_stats()["a"].num_held_blocks == 5
    run.to_end()
    core.add(make_request("a2", range(20), tenant="a", max_tokens=1))
    run.to_end()
    stats = core.tenant_stats()
    assert stats["a"] == TenantStats(
        prefix_queries_total=40,
        prefix_hits_total=16,
        prompt_tokens_total=40,
        generation_tokens_total=4,
    )
    assert (stats["b"].prompt_tokens_total, stats["b"].generation_tokens_total) == (10, 2)
    assert stats[""].prompt_tokens_total == 5
    whole = core.stats()
    assert whole.prompt_tokens_total == sum(s.prompt_tokens_total for s in stats.values())


def test_invented_tenants_share_one_account_beyond_a_thousand() -> None:
    counters = EngineCounters()
    for i in range(1500):
        counters.account(f"t{i}").preemptions += 1
    assert len(counters.tenants) == 1001
    assert counters.account(None).preemptions == 500


def test_evictions_are_counted_for_the_tenant_whose_block_is_lost() -> None:
    core = make_core(num_blocks=9)
    run(core, make_request("a", range(16), tenant="a", max_tokens=1))
    run(core, make_request("b", range(50, 66), tenant="b", max_tokens=1))
    assert core.stats().evictions_total == 0
    run(core, make_request("nobody", range(80, 92), max_tokens=1))
    stats = core.tenant_stats()
    assert (stats["a"].evictions_total, stats["b"].evictions_total) == (3, 0)
    assert stats[""].evictions_total == 0
    assert core.stats().evictions_total == 3


def test_evictions_of_invented_tenants_are_bounded_too() -> None:
    evictions = Evictions()
    for i in range(1500):
        evictions.count([f"t{i}"])
    assert (evictions.total, evictions.of("t0"), evictions.of("t1400")) == (1500, 1, 0)
    assert evictions.of(None) == 500


def test_padding_that_the_runner_reports_adds_up() -> None:
    class Padding(ScriptedExecutor):
        def collect(self) -> ModelRunnerOutput:
            return msgspec.structs.replace(super().collect(), num_padding_tokens=3)

    executor = Padding(num_blocks=64, block_size=16)
    core = EngineCore(EngineConfig(), executor, VirtualClock())
    finished = run(core, make_request("a", range(20), max_tokens=4))
    assert core.stats().padding_tokens_total == 3 * finished.num_steps
