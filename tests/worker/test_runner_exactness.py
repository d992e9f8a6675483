"""Greedy tokens in float32 equal transformers' `generate`, however the scheduler cuts the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    greedy,
    largest_gap_to_best,
    load_reference,
    random_prompts,
    reference_greedy,
    reset_sometimes,
    write_tiny_model,
)
from worker.executors.uniproc import UniprocExecutor

NUM_TOKENS = 40
BLOCK_SIZE = 16
PROMPTS = random_prompts(20, lengths=[1, 15, 16, 17, 33, 90, 130], vocab_size=VOCAB_SIZE)
CONFIG = EngineConfig(check_integrity=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = load_reference(folder)
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def executor(folder: Path) -> UniprocExecutor:
    return executor_for(folder)


def test_each_prompt_alone(executor: UniprocExecutor, expected: list[list[int]]) -> None:
    run = EngineRun(executor, CONFIG)
    assert [run.generate([p], greedy(NUM_TOKENS))[0] for p in PROMPTS] == expected


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_all_prompts_in_one_batch(
    executor: UniprocExecutor, expected: list[list[int]], budget: int
) -> None:
    config = EngineConfig(max_num_batched_tokens=budget, check_integrity=True)
    assert EngineRun(executor, config).generate(PROMPTS, greedy(NUM_TOKENS)) == expected


def test_prefix_hits_of_every_length(executor: UniprocExecutor, expected: list[list[int]]) -> None:
    prompt = PROMPTS[6]
    for num_blocks in range(len(prompt) // BLOCK_SIZE + 1):
        run = EngineRun(executor, CONFIG)
        shared = num_blocks * BLOCK_SIZE
        run.generate([[*prompt[:shared], 5]], greedy(1))
        assert run.generate([prompt], greedy(NUM_TOKENS)) == [expected[6]]
        assert run.num_cached == [shared]


@pytest.mark.fault("engine-4")
def test_a_prompt_of_exactly_two_blocks_sent_twice_recomputes_its_last_block(
    executor: UniprocExecutor,
) -> None:
    prompt = PROMPTS[5][: 2 * BLOCK_SIZE]
    run = EngineRun(executor, CONFIG)
    first = run.generate([prompt], greedy(8))
    assert run.generate([prompt], greedy(8)) == first
    assert run.num_cached == [BLOCK_SIZE]


def test_forced_preemption(folder: Path, expected: list[list[int]]) -> None:
    run = EngineRun(executor_for(folder, num_blocks=24), CONFIG)
    assert run.generate(PROMPTS, greedy(NUM_TOKENS)) == expected
    assert run.core.counters.preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_scheduled_ahead(folder: Path, expected: list[list[int]], depth: int) -> None:
    executor = executor_for(folder, num_blocks=24, async_depth=depth)
    run = EngineRun(executor, EngineConfig(async_depth=depth, check_integrity=True))
    assert run.generate(PROMPTS, greedy(NUM_TOKENS)) == expected
    assert run.core.counters.preemptions > 0
    executor.close()


def test_preemption_of_everything_by_a_reset(
    executor: UniprocExecutor, expected: list[list[int]]
) -> None:
    run = EngineRun(executor, CONFIG, before_step=reset_sometimes)
    assert run.generate(PROMPTS[:5], greedy(NUM_TOKENS)) == expected[:5]
    assert run.core.counters.preemptions >= 5


def test_bfloat16_chooses_otherwise_only_where_the_best_logits_nearly_tie(folder: Path) -> None:
    tolerance = 0.25  # two steps of bfloat16 at the size of these logits (16 to 32)
    reference = load_reference(folder, torch.bfloat16)
    run = EngineRun(executor_for(folder, dtype="bfloat16"), CONFIG)
    for prompt, tokens in zip(PROMPTS, run.generate(PROMPTS, greedy(NUM_TOKENS)), strict=True):
        assert largest_gap_to_best(reference, prompt, tokens) <= tolerance
