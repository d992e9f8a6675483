"""Grammars with guessed tokens: what is said does not change, and nothing invalid is verified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, SpeculationConfig
from engine.frontend.sampling_params import GrammarSpec, SamplingParams, ThinkingSpan
from tests.worker.model_fixtures import EngineRun, write_tiny_model
from worker.executors.uniproc import UniprocExecutor

GUESSING = SpeculationConfig(method="ngram", adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Engine:
    """An executor and the settings of the cores that run on it."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.config = config
        self.executor = UniprocExecutor(
            folder, dtype="float32", engine_config=config, num_threads=1, num_blocks=512
        )

    def run(self) -> EngineRun:
        return EngineRun(self.executor, self.config)


@pytest.fixture(scope="module", params=[0, 2], ids=["in step", "ahead"])
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One that guesses, and one that does not."""
    configs = [
        EngineConfig(async_depth=request.param, speculation=speculation)
        for speculation in (GUESSING, SpeculationConfig())
    ]
    guessing, plain = (Engine(folder, config) for config in configs)
    yield guessing, plain
    guessing.executor.close()
    plain.executor.close()


def both(
    engines: tuple[Engine, Engine], prompts: list[list[int]], sampling: list[SamplingParams]
) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokens with and without guessing, and how many guesses were right."""
    guessing, plain = (engine.run() for engine in engines)
    guessed = guessing.generate(prompts, sampling)
    num_right = guessing.core.scheduler.counters.speculation.num_accepted
    return guessed, plain.generate(prompts, sampling), num_right


@pytest.mark.fault("engine-34")
def test_guesses_that_fit_the_grammar_change_nothing(
    engines: tuple[Engine, Engine], tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode('say {"a":1,"b":2} and {"a":1,"b":2} again').ids
    spec = GrammarSpec("json_schema", '{"const": [{"a":1,"b":2},{"a":1,"b":2}]}', whitespace="")
    sampling = SamplingParams(max_tokens=60, temperature=0.0, grammar=spec)
    guessed, plain, num_right = both(engines, [prompt], [sampling])
    assert tokenizer.decode(guessed[0][:-1]) == '[{"a":1,"b":2},{"a":1,"b":2}]'
    assert guessed == plain
    assert num_right > 10


@pytest.mark.fault("engine-34")
def test_guesses_across_the_end_of_thinking_are_held_to_the_grammar(
    engines: tuple[Engine, Engine], tokenizer: Tokenizer
) -> None:
    (border,) = tokenizer.encode("|").ids
    # The prompt's own repetition is what is guessed: behind the border it breaks the grammar.
    prompts = [tokenizer.encode("xy|noxy|noxy|no" * 3 + "xy"[: i % 3]).ids for i in range(12)]
    sampling = [
        SamplingParams(
            max_tokens=60,
            temperature=1.0,
            seed=i,
            logit_bias=((border, 4.0), *((t, 5.0) for t in tokenizer.encode("xyno").ids)),
            grammar=GrammarSpec("regex", "(ab){4}c", thinking=ThinkingSpan(border)),
        )
        for i in range(12)
    ]
    guessed, plain, num_right = both(engines, prompts, sampling)
    assert guessed == plain
    assert num_right > 0
    answers = [tokenizer.decode(tokens).partition("|")[2] for tokens in guessed if border in tokens]
    assert len(answers) > 6
    assert all(re.fullmatch("(ab){4}c#", answer) for answer in answers)
