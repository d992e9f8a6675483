"""The fold of steps: what it keeps, and which steps contradict what came before them."""

from __future__ import annotations

import pytest

from engine.frontend.sampling_params import SamplingParams
from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.runner_state import RunnerState, digest_of


def step_of(
    *,
    new: tuple[str, ...] = (),
    blocks: dict[str, list[list[int]]] | None = None,
    scheduled: dict[str, int] | None = None,
    computed: dict[str, int] | None = None,
    dropped: tuple[str, ...] = (),
    prompt: dict[str, list[int]] | None = None,
    resync: bool = False,
) -> SchedulerOutput:
    return SchedulerOutput(
        step=1,
        new_requests=[
            NewRequestData(
                request_id=request_id,
                token_ids=[1, 2, 3],
                num_prompt_tokens=3,
                num_computed_tokens=0,
                block_ids=[[7]],
                sampling=SamplingParams(),
            )
            for request_id in new
        ],
        new_block_ids=blocks or {},
        num_scheduled_tokens=scheduled or {},
        num_computed_tokens=computed or {},
        dropped_request_ids=list(dropped),
        new_prompt_ids=prompt or {},
        resync=resync,
    )


def state_after(*steps: SchedulerOutput) -> RunnerState:
    state = RunnerState()
    for step in steps:
        state.take_step(step)
    return state


def test_a_state_is_tokens_blocks_and_progress() -> None:
    state = state_after(step_of(new=("a",), scheduled={"a": 3}, computed={"a": 0}))
    state.take_output(ModelRunnerOutput(sampled_token_ids={"a": [9], "gone": [9]}))
    state.take_step(step_of(blocks={"a": [[8]]}, prompt={"a": [5]}))
    assert state.digest() == digest_of([("a", [1, 2, 3, 9, 5], [[7, 8]], 3)])


def test_the_order_in_which_requests_came_does_not_matter() -> None:
    assert (
        state_after(step_of(new=("a", "b"))).digest()
        == state_after(step_of(new=("b",)), step_of(new=("a",))).digest()
    )


@pytest.mark.parametrize("last", [step_of(dropped=("a", "b", "c")), step_of(resync=True)])
def test_nothing_is_left_of_what_was_dropped_or_before_a_resync(last: SchedulerOutput) -> None:
    assert state_after(step_of(new=("a", "b")), last).digest() == RunnerState().digest()


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (step_of(new=("a",)), "a is new but runs already"),
        (step_of(blocks={"x": [[1]]}), "x does not run"),
        (step_of(prompt={"x": [1]}), "x does not run"),
        (step_of(scheduled={"x": 1}, computed={"x": 0}), "x does not run"),
        (
            step_of(scheduled={"a": 1}, computed={"a": 2}),
            "a has 0 tokens computed, the step says 2",
        ),
    ],
)
def test_a_step_that_contradicts_the_ones_before_says_how(
    step: SchedulerOutput, problem: str
) -> None:
    with pytest.raises(ValueError, match=f"step 1: {problem}"):
        state_after(step_of(new=("a",)), step)
