"""Every native family equals transformers: windows, norms, experts, Gemma, on one rank or several.

The models are small and random, but for the shapes that set a family apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import EngineConfig, SpeculationConfig
from tests.worker.logit_fixtures import NUM_POSITIONS, logits_of
from tests.worker.model_fixtures import (
    FAMILIES,
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    greedy,
    load_reference,
    random_prompts,
    reference_greedy,
    write_tiny_model,
)
from worker.executors.uniproc import UniprocExecutor
from worker.model.config import read_model_config
from worker.model.load_decoder import load_decoder
from worker.model.parallel import ALONE, RankGroup

MAX_DIFFERENCE = 1e-3
NUM_TOKENS = 12
ON_ONE_RANK = ("granite with mamba", "granite with mamba and experts")
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        target = root / name.replace(" ", "-")
        if not target.exists():
            family, overrides = FAMILIES[name]
            write_tiny_model(target, family=family, **overrides)
        return target

    return folder


def our_logits(
    folder: Path, token_ids: list[int], sizes: list[int], ranks: RankGroup = ALONE
) -> torch.Tensor:
    """Compute all logits of a prompt in float32, chunk by chunk."""
    config = read_model_config(folder)
    model = load_decoder(
        folder, config, dtype=torch.float32, num_positions=NUM_POSITIONS, ranks=ranks
    )
    return logits_of(model, token_ids, sizes)


class ThreadRanks(RankGroup):
    """Ranks that are threads of this process and meet in its memory."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[torch.Tensor]) -> None:
        super().__init__(rank, len(board))
        self._barrier = barrier
        self._board = board

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(partial)).sum(dim=0)

    def join_columns(self, columns: torch.Tensor, *, total: int) -> torch.Tensor:
        return torch.cat(self._exchange(columns), dim=-1)[:, :total]

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = mine
        self._barrier.wait()
        everything = list(self._board)
        self._barrier.wait()
        return everything


def logits_of_ranks(folder: Path, prompt: list[int], size: int) -> list[torch.Tensor]:
    """Return what each rank says of the prompt in two chunks."""
    barrier, board = threading.Barrier(size), [torch.empty(0)] * size
    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        with torch.inference_mode():
            group = ThreadRanks(rank, barrier, board)
            results[rank] = our_logits(folder, prompt, [60, len(prompt) - 60], group)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [results[rank] for rank in range(size)]


@EVERY_FAMILY
def test_logits_equal_transformers_in_one_chunk_in_many_and_on_ranks(
    folder_of: Callable[[str], Path], name: str
) -> None:
    folder = folder_of(name)
    (prompt,) = random_prompts(1, lengths=[150], vocab_size=VOCAB_SIZE)
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([prompt])).logits[0]
        assert (our_logits(folder, prompt, [150]) - expected).abs().max() <= MAX_DIFFERENCE
        chunked = our_logits(folder, prompt, [1, 40, 16, 1, 1, 91])
    assert (chunked - expected).abs().max() <= MAX_DIFFERENCE
    # Two KV heads: one for each of two ranks, and each of them on three of six.
    for size in () if name in ON_ONE_RANK else (2, 6):
        for logits in logits_of_ranks(folder, prompt, size):
            assert (logits - expected).abs().max() <= MAX_DIFFERENCE


@EVERY_FAMILY
def test_greedy_tokens_equal_transformers_with_chunks_and_prefix_hits(
    folder_of: Callable[[str], Path], name: str
) -> None:
    folder = folder_of(name)
    prompts = random_prompts(3, lengths=[90, 33, 130], vocab_size=VOCAB_SIZE)
    prompts.append([*prompts[0][:70], *prompts[1]])
    model = load_reference(folder)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    executor = executor_for(folder, num_blocks=128)
    run = EngineRun(executor, EngineConfig(max_num_batched_tokens=40, check_integrity=True))
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    assert run.num_cached == [80, 32, 128, 96]


@pytest.mark.parametrize(
    ("num_blocks", "config"),
    [
        pytest.param(70, EngineConfig(num_host_blocks=64), id="a small pool and a host tier"),
        pytest.param(70, EngineConfig(max_num_batched_tokens=40), id="a small pool"),
        pytest.param(256, EngineConfig(async_depth=2), id="steps ahead"),
        pytest.param(
            256,
            EngineConfig(speculation=SpeculationConfig(method="ngram", adaptive=False)),
            id="drafts",
        ),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "qwen2 half windowed",
        "lfm2",
        "granite with mamba",
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
def test_layers_of_several_kinds_together_bear_everything_that_full_ones_do(
    folder_of: Callable[[str], Path], name: str, num_blocks: int, config: EngineConfig
) -> None:
    folder = folder_of(name)
    prompts = random_prompts(4, lengths=[90, 33, 130], vocab_size=VOCAB_SIZE)
    prompts.append((prompts[1][:12] * 8)[:90])
    model = load_reference(folder)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    executor = UniprocExecutor(
        folder, dtype="float32", engine_config=config, num_threads=1, num_blocks=num_blocks
    )
    checked = msgspec.structs.replace(config, check_integrity=True)
    run = EngineRun(executor, checked)
    for _ in range(2):
        assert run.generate(prompts, greedy(NUM_TOKENS)) == expected
    executor.close()
