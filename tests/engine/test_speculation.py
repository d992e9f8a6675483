"""Guesses change when tokens come, and nothing else: not the tokens, not the cache, nobody's place.

Drafts are right, wrong or partly right; the scripted executor's next token hashes all KV contents
it reads, those of accepted drafts included.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import EngineRequest
from engine.output import SchedulerOutput
from engine.scripted_executor import ScriptedExecutor
from engine.spec_decode.acceptance import Acceptance
from engine.spec_decode.proposer import DraftContext
from engine.step_log import RecordingExecutor, StepLog, replay
from kvindex.foundation.clock import VirtualClock
from tests.engine.build import (
    BLOCK_SIZE,
    Run,
    alone,
    make_core,
    make_request,
    pressing_requests,
    run,
)
from tests.engine.drafting import Guesses, Oracle
from tests.engine.hybrid import GROUPS, alone_with, make_hybrid_core
from tests.engine.lossy_executor import LossyExecutor

each_depth = pytest.mark.parametrize("depth", [0, 1, 2])
each_guess = pytest.mark.parametrize("guesses", ["right", "wrong", "partly"])


def drafting_core(guesses: Guesses, *requests: EngineRequest, **settings: object) -> EngineCore:
    """Build a core whose executor guesses what the requests will say."""
    oracle = Oracle(alone, guesses)
    oracle.expect(*requests)
    return make_core(proposer=oracle, **settings)  # type: ignore[arg-type]


def watch(core: EngineCore) -> list[SchedulerOutput]:
    """Return a list that every later step is noted in."""
    steps: list[SchedulerOutput] = []
    submit = core.executor.submit

    def noted(step: SchedulerOutput) -> None:
        steps.append(step)
        submit(step)

    core.executor.submit = noted  # type: ignore[method-assign]
    return steps


def check_drafts(steps: Sequence[SchedulerOutput]) -> int:
    """Check that every draft belongs to a token computed in the same step; return their number."""
    count = 0
    for step in steps:
        new = {request.request_id for request in step.new_requests}
        for request_id, drafts in step.draft_token_ids.items():
            assert step.num_scheduled_tokens[request_id] == 1 + len(drafts)
            assert request_id not in new
            assert all(0 <= token < 256 for token in drafts)
            count += len(drafts)
    return count


def test_right_guesses_make_steps_of_several_tokens() -> None:
    request = make_request("a", range(10), max_tokens=13)
    core = drafting_core("right", request)
    steps = watch(core)
    result = run(core, request)
    assert result.tokens["a"] == alone(request)
    assert [step.num_scheduled_tokens["a"] for step in steps] == [10, 5, 5, 2]
    assert core.counters.speculation == Acceptance(
        num_drafts=3, num_tokens=9, num_accepted=9, accepted_at=[3, 2, 2, 2]
    )


def test_wrong_guesses_cost_nothing_but_rows() -> None:
    request = make_request("a", range(10), max_tokens=5)
    core = drafting_core("wrong", request)
    steps = watch(core)
    result = run(core, request)
    assert result.tokens["a"] == alone(request)
    assert [step.num_scheduled_tokens["a"] for step in steps] == [10, 4, 3, 2, 1]
    assert [step.num_computed_tokens["a"] for step in steps] == [0, 10, 11, 12, 13]
    assert core.counters.speculation.num_accepted == 0


@each_depth
@each_guess
def test_the_same_blocks_are_cached_as_without_guesses(guesses: Guesses, depth: int) -> None:
    """A hash stands for tokens that were said, never for a guess."""
    for max_tokens in range(1, 4 * BLOCK_SIZE):
        request = make_request("a", range(10), max_tokens=max_tokens)
        plain, guessing = make_core(), drafting_core(guesses, request, async_depth=depth)
        assert run(plain, request).tokens == run(guessing, request).tokens
        cached = [sorted(core.kv_cache.pool.cached_hashes()) for core in (plain, guessing)]
        assert cached[0] == cached[1]
        again = make_request("b", [*range(10), *alone(request)], max_tokens=3)
        assert run(guessing, again).tokens["b"] == alone(again)


@each_depth
@pytest.mark.fault("engine-7")
def test_a_stop_token_within_accepted_guesses_cuts_what_is_behind_it(depth: int) -> None:
    free = alone(make_request("a", range(10), max_tokens=12))
    for stop in free[1:8]:
        request = make_request("a", range(10), max_tokens=12, stop_token_ids=(stop,), logprobs=0)
        core = drafting_core(
            "right", make_request("a", range(10), max_tokens=12), async_depth=depth
        )
        core.add(request)
        result = Run(core)
        outputs = [output for _ in range(20) if core.has_work for output in result.step()]
        expected = free[: free.index(stop) + 1]
        assert result.tokens["a"] == expected
        assert [e.token_id for output in outputs for e in output.logprobs] == expected
        assert result.finish["a"] == "stop"
        assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


def test_guesses_end_where_the_model_ends() -> None:
    request = make_request("a", range(10), max_tokens=50)
    core = drafting_core("right", request, max_model_len=18)
    steps = watch(core)
    result = run(core, request)
    assert result.tokens["a"] == alone(make_request("a", range(10), max_tokens=8))
    assert [step.num_scheduled_tokens["a"] for step in steps] == [10, 5, 2]


def test_every_running_request_gets_its_token_before_anybody_guesses() -> None:
    requests = [make_request(f"r{i}", [i], max_tokens=9) for i in range(4)]
    core = drafting_core("right", *requests, budget=6)
    steps = watch(core)
    result = run(core, *requests)
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    assert steps[1].num_scheduled_tokens == {"r0": 3, "r1": 1, "r2": 1, "r3": 1}


def test_guesses_give_way_before_anybody_is_preempted() -> None:
    """Six blocks: two requests fit to their ends exactly; a third block for guesses never does."""
    requests = [make_request(f"r{i}", range(20 * i, 20 * i + 5), max_tokens=7) for i in range(2)]
    core = drafting_core("wrong", *requests, num_blocks=7)
    steps = watch(core)
    result = run(core, *requests)
    assert core.counters.preemptions == 0
    assert check_drafts(steps) > 0
    assert result.tokens == {r.request_id: alone(r) for r in requests}


def test_an_engine_with_states_takes_no_guesses() -> None:
    groups = GROUPS["full+state"]
    request = make_request("a", range(10), max_tokens=9)
    oracle = Oracle(lambda each: alone_with(groups, each), "right")
    oracle.expect(request)
    core = make_hybrid_core(groups, proposer=oracle)
    steps = watch(core)
    assert run(core, request).tokens["a"] == alone_with(groups, request)
    assert check_drafts(steps) == 0


@pytest.mark.fault("engine-22")
@pytest.mark.fault("engine-26")
@each_depth
@each_guess
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_leaves_no_guess_behind_and_keeps_its_tokens(
    guesses: Guesses, depth: int, policy: str
) -> None:
    requests = pressing_requests(30, seed=5)
    core = drafting_core(
        guesses,
        *requests,
        num_blocks=14,
        budget=12,
        max_num_seqs=6,
        async_depth=depth,
        policy=policy,
        max_preemptions=2,
    )
    steps = watch(core)
    result = run(core, *requests)
    assert core.counters.preemptions > 0
    assert check_drafts(steps) > 0
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


@pytest.mark.fault("engine-26")
@each_depth
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_guesses_in_flight_when_everybody_is_preempted_still_count(
    depth: int, num_steps: int
) -> None:
    requests = [make_request(f"r{i}", range(20 * i, 20 * i + 9), max_tokens=12) for i in range(3)]
    core = drafting_core("partly", *requests, async_depth=depth)
    for request in requests:
        core.add(request)
    result = Run(core)
    for _ in range(2):
        for _ in range(num_steps):
            result.step()
        assert core.reset_prefix_cache(preempt_running=True)
    result.to_end()
    assert result.tokens == {r.request_id: alone(r) for r in requests}


@pytest.mark.fault("engine-27")
@each_depth
def test_a_request_that_is_left_out_of_a_step_goes_on_with_its_own_guesses(depth: int) -> None:
    """Three tokens a step for five requests: some wait, with guesses, and go on afterwards."""
    requests = [make_request(f"r{i}", [i, i + 1], max_tokens=10) for i in range(5)]
    core = drafting_core("right", *requests, budget=3, async_depth=depth)
    steps = watch(core)
    result = run(core, *requests)
    assert any(len(step.num_scheduled_tokens) < 4 for step in steps)
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    for step in steps:
        for request_id, drafts in step.draft_token_ids.items():
            start = step.num_computed_tokens[request_id] - 1
            assert drafts == result.tokens[request_id][start : start + len(drafts)]


@each_depth
def test_a_runner_that_lost_its_place_goes_on_without_the_guesses_in_flight(depth: int) -> None:
    requests = [make_request(f"r{i}", range(20 * i, 20 * i + 9), max_tokens=12) for i in range(2)]
    oracle = Oracle(alone, "right")
    oracle.expect(*requests)

    def make_runner() -> ScriptedExecutor:
        return ScriptedExecutor(num_blocks=64, block_size=BLOCK_SIZE, proposer=oracle)

    executor = LossyExecutor(make_runner, {3: "died", 5: "spoiled"})
    config = EngineConfig(
        block_size=BLOCK_SIZE, async_depth=depth, max_step_s=0.0, check_integrity=True
    )
    core = EngineCore(config, executor, VirtualClock())
    result = run(core, *requests)
    assert len(executor.resyncs) == 2
    assert result.tokens == {r.request_id: alone(r) for r in requests}


def test_a_recording_with_guesses_replays_on_a_runner_that_makes_none() -> None:
    requests = pressing_requests(8, seed=7)
    oracle = Oracle(alone, "partly")
    oracle.expect(*requests)
    stream = io.BytesIO()
    executor = ScriptedExecutor(num_blocks=20, block_size=BLOCK_SIZE, proposer=oracle)
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=12, max_step_s=0.0)
    core = EngineCore(config, RecordingExecutor(executor, stream), VirtualClock())
    result = run(core, *requests)
    stream.seek(0)
    again = replay(StepLog(stream), ScriptedExecutor(num_blocks=20, block_size=BLOCK_SIZE))
    assert again.sampled_token_ids.keys() == result.tokens.keys()


class _Nothing:
    """A proposer without an idea."""

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        return {}

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def test_a_proposer_without_an_idea_changes_no_step() -> None:
    request = make_request("a", range(10), max_tokens=4)
    core = make_core(proposer=_Nothing())
    steps = watch(core)
    run(core, request)
    assert [step.num_scheduled_tokens.get("a", 0) for step in steps] == [10, 1, 1, 1]
    assert core.counters.speculation == Acceptance()
