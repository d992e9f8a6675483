"""A real model behind the step protocol: resynced, recorded, replayed, with the same tokens."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.executor import ExecutorInfo
from engine.frontend.sampling_params import SamplingParams
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.runner_state import RunnerState
from engine.step_log import RecordingExecutor, StepLog, replay
from tests.engine.lossy_executor import Fault, LossyExecutor
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    greedy,
    random_prompts,
    write_tiny_model,
)
from worker.executors.uniproc import UniprocExecutor

PROMPTS = random_prompts(3, lengths=[50, 50, 7], vocab_size=VOCAB_SIZE)
SAMPLING = [greedy(12), SamplingParams(temperature=0.9, seed=5, max_tokens=12), greedy(20)]
CONFIG = EngineConfig(max_num_batched_tokens=24, max_step_s=0.0, watermark=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[int]]:
    """The tokens of a run in which nothing goes wrong."""
    return EngineRun(executor_for(folder, num_blocks=64), CONFIG).generate(PROMPTS, SAMPLING)


class ShadowedExecutor:
    """A model whose runner must know, after every step, what the fold of all steps says."""

    def __init__(self, executor: UniprocExecutor) -> None:
        self._executor = executor
        self._state = RunnerState()
        self.num_compared = 0

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def submit(self, step: SchedulerOutput) -> None:
        self._state.take_step(step)
        self._executor.submit(step)

    def collect(self) -> ModelRunnerOutput:
        output = self._executor.collect()
        self._state.take_output(output)
        runner = self._executor._runner
        assert runner is not None
        assert runner.state_digest() == self._state.digest()
        self.num_compared += 1
        return output

    def close(self) -> None:
        self._executor.close()


@pytest.mark.parametrize("fault", ["spoiled", "restarted", "died"])
@pytest.mark.parametrize("at", [2, 4, 9])
def test_a_resync_changes_no_token(
    folder: Path, undisturbed: list[list[int]], fault: Fault, at: int
) -> None:
    def make_runner() -> ShadowedExecutor:
        return ShadowedExecutor(executor_for(folder, num_blocks=64))

    executor = LossyExecutor(make_runner, {at: fault})
    assert EngineRun(executor, CONFIG).generate(PROMPTS, SAMPLING) == undisturbed
    assert len(executor.resyncs) == 1


def test_the_runner_knows_what_the_fold_of_all_steps_says(
    folder: Path, undisturbed: list[list[int]]
) -> None:
    executor = ShadowedExecutor(executor_for(folder, num_blocks=64))
    assert EngineRun(executor, CONFIG).generate(PROMPTS, SAMPLING) == undisturbed
    assert executor.num_compared > 20


@pytest.mark.parametrize("depth", [0, 1])
def test_a_recorded_run_samples_the_same_tokens_again(folder: Path, depth: int) -> None:
    config = EngineConfig(max_num_batched_tokens=24, max_step_s=0.0, async_depth=depth)
    stream = io.BytesIO()
    recorder = RecordingExecutor(executor_for(folder, num_blocks=64, async_depth=depth), stream)
    tokens = EngineRun(recorder, config).generate(PROMPTS, SAMPLING)
    recorder.close()
    result = replay(StepLog(io.BytesIO(stream.getvalue())), executor_for(folder, num_blocks=64))
    assert sorted(result.sampled_token_ids.values()) == sorted(tokens)
