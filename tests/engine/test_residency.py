"""Ages of cached blocks: what a life, an idle time and a gap between two uses are."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.residency import AGE_BUCKETS_S, AgeCounts, BlockAges
from engine.scripted_executor import ScriptedExecutor
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import make_request, run


def test_an_age_falls_into_the_bucket_whose_bound_it_does_not_exceed() -> None:
    ages = AgeCounts()
    for age_s in (0.1, 0.2, 4000.0):
        ages.observe(age_s)
    assert ages.counts == [1, 1, *[0] * (len(AGE_BUCKETS_S) - 2), 1]
    assert ages.total_s == 4000.3


def test_the_ages_of_several_engines_add_up() -> None:
    one, other = BlockAges(), BlockAges()
    one.idle.observe(2.0)
    other.idle.observe(3.0)
    other.reuse_gap.observe(50.0)
    whole = BlockAges.sum([one, other])
    assert (whole.idle.counts[2], whole.idle.total_s) == (2, 5.0)
    assert (sum(whole.reuse_gap.counts), sum(whole.lifetime.counts)) == (1, 0)
    assert sum(one.idle.counts) == 1


def test_blocks_are_timed_from_commit_to_reuse_to_eviction() -> None:
    clock = VirtualClock()
    executor = ScriptedExecutor(num_blocks=33, block_size=4)
    core = EngineCore(EngineConfig(block_size=4, max_step_s=0.0, watermark=0.0), executor, clock)
    prompt = list(range(100))
    run(core, make_request("a", prompt, max_tokens=1))
    clock.advance(20.0)
    run(core, make_request("b", prompt, max_tokens=1))
    clock.advance(50.0)
    run(core, make_request("c", range(100, 220), max_tokens=1))
    ages = core.stats().block_ages
    assert (sum(ages.reuse_gap.counts), ages.reuse_gap.total_s) == (1, 20.0)
    assert (sum(ages.lifetime.counts), ages.lifetime.total_s) == (1, 70.0)
    assert (sum(ages.idle.counts), ages.idle.total_s) == (1, 50.0)


def test_a_reset_is_no_eviction() -> None:
    core = EngineCore(
        EngineConfig(block_size=4, max_step_s=0.0),
        ScriptedExecutor(num_blocks=33, block_size=4),
        VirtualClock(),
    )
    run(core, make_request("a", range(100), max_tokens=1))
    assert core.reset_prefix_cache(preempt_running=False)
    run(core, make_request("b", range(100, 200), max_tokens=1))
    assert sum(core.stats().block_ages.lifetime.counts) == 0
