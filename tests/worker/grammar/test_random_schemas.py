"""Random schemas on a model of random weights: what it says always parses and validates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.frontend.sampling_params import GrammarSpec, SamplingParams
from tests.worker.grammar.random_schemas import Schema, random_schema
from tests.worker.model_fixtures import EngineRun, executor_for, write_tiny_model
from worker.executors.uniproc import UniprocExecutor

EOS = 2
NUM_SLOW_SCHEMAS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[UniprocExecutor]:
    executor = executor_for(folder)
    yield executor
    executor.close()


def wanting(schema: Schema, seed: int, closing: tuple[int, ...]) -> SamplingParams:
    """Ask for the schema, of a model that would rather come to an end."""
    return SamplingParams(
        max_tokens=480,
        temperature=1.0,
        seed=seed,
        logit_bias=tuple((token_id, 8.0) for token_id in closing),
        grammar=GrammarSpec("json_schema", json.dumps(schema)),
    )


def say(executor: UniprocExecutor, folder: Path, schemas: list[Schema]) -> list[str]:
    """Return the text that the model says for each schema; all come to their end."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    closing = (EOS, *tokenizer.encode('"}]').ids)
    run = EngineRun(executor, EngineConfig())
    wanted = [wanting(schema, i, closing) for i, schema in enumerate(schemas)]
    outputs = run.generate([list(range(10, 30))] * len(schemas), wanted)
    assert {tokens[-1] for tokens in outputs} == {EOS}
    return [tokenizer.decode(tokens[:-1]) for tokens in outputs]


def check(executor: UniprocExecutor, folder: Path, *, seed: int, count: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    texts = say(executor, folder, schemas)
    for schema, text in zip(schemas, texts, strict=True):
        checker = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        checker.validate(json.loads(text))


def test_what_random_schemas_get_parses_and_validates(
    executor: UniprocExecutor, folder: Path
) -> None:
    check(executor, folder, seed=1, count=40)


@pytest.mark.slow
def test_what_many_random_schemas_get_parses_and_validates(
    executor: UniprocExecutor, folder: Path
) -> None:
    check(executor, folder, seed=2, count=NUM_SLOW_SCHEMAS)
