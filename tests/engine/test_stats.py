"""Measured rates, and the step budget that follows from them."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.scripted_executor import ScriptedExecutor, StepCost
from engine.stats import StepRates
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import Run, make_request


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
    assert StepRates().tokens_within(0.5) == 128


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
    assert durations[0] == 0.64
    assert all(0.49 < d < 0.51 for d in durations[1:-1])
