"""A Granite 4 with Mamba layers under the scheduler: its greedy tokens are those of transformers.

However prefixes are shared and requests preempted, states are read where they were kept. What every
family must bear is in test_model_families.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from tests.worker.model_fixtures import (
    FAMILIES,
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
    reset_sometimes,
    write_tiny_model,
)
from worker.executors.uniproc import UniprocExecutor

NUM_TOKENS = 20
BLOCK_SIZE = 16
PROMPTS = random_prompts(7, lengths=[31, 90, 33, 100, 31, 30, 29], vocab_size=VOCAB_SIZE)
CONFIG = EngineConfig(check_integrity=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = FAMILIES["granite with mamba"]
    return write_tiny_model(tmp_path_factory.mktemp("granite"), family=family, **overrides)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = load_reference(folder)
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def executor(folder: Path) -> UniprocExecutor:
    return executor_for(folder, num_blocks=256)


def test_prefix_hits_of_every_length(executor: UniprocExecutor, expected: list[list[int]]) -> None:
    """A block of attention holds 48 tokens here; a prefix may end inside of one."""
    prompt = PROMPTS[3]
    for num_blocks in range(len(prompt) // BLOCK_SIZE + 1):
        run = EngineRun(executor, CONFIG)
        shared = num_blocks * BLOCK_SIZE
        run.generate([[*prompt[:shared], 5]], greedy(1))
        assert run.generate([prompt], greedy(NUM_TOKENS)) == [expected[3]]
        assert run.num_cached == [shared]


def test_a_burst_of_siblings_computes_its_prefix_once(
    folder: Path, executor: UniprocExecutor
) -> None:
    siblings = [[*PROMPTS[1][:64], *PROMPTS[2][i:]] for i in range(3)]
    model = load_reference(folder)
    expected = [reference_greedy(model, prompt, 6) for prompt in siblings]
    run = EngineRun(executor, CONFIG)
    assert run.generate(siblings, greedy(6)) == expected
    assert run.num_cached == [0, 64, 64]


def test_forced_preemption_with_steps_scheduled_ahead(
    folder: Path, expected: list[list[int]]
) -> None:
    executor = executor_for(folder, num_blocks=28, async_depth=2)
    run = EngineRun(executor, EngineConfig(async_depth=2, check_integrity=True))
    assert run.generate(PROMPTS, greedy(NUM_TOKENS)) == expected
    assert run.core.counters.preemptions > 0
    executor.close()


def test_preemption_of_everything_by_a_reset(
    executor: UniprocExecutor, expected: list[list[int]]
) -> None:
    run = EngineRun(executor, CONFIG, before_step=reset_sometimes)
    assert run.generate(PROMPTS, greedy(NUM_TOKENS)) == expected
    assert run.core.counters.preemptions >= 5
