"""Every native family equals transformers: windows, norms, experts, Gemma, on one rank or several.

The models are small and random, but for the shapes that set a family apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig, SpeculationConfig
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
from worker.cpu.attention import AttentionPlan
from worker.executors.uniproc import UniprocExecutor
from worker.model.config import read_model_config
from worker.model.kv_layout import attention_block_size, kv_layout
from worker.model.llama import KVCache
from worker.model.load_decoder import load_decoder
from worker.model.parallel import ALONE, RankGroup

BLOCK_SIZE = 16
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
    folder: Path,
    token_ids: list[int],
    sizes: list[int],
    ranks: RankGroup = ALONE,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute all logits of a prompt, chunk by chunk, over scattered blocks of every group."""
    config = read_model_config(folder)
    model = load_decoder(folder, config, dtype=dtype, num_positions=512, ranks=ranks)
    layout = kv_layout(config.num_layers, config.windows)
    local = model.config
    of_attention = attention_block_size(config, block_size=BLOCK_SIZE, itemsize=dtype.itemsize)
    tokens = of_attention or BLOCK_SIZE
    shape = (layout.num_rows, 256, tokens, local.num_kv_heads, local.head_dim)
    cache = KVCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    cache.keys[:, 0] = cache.values[:, 0] = 0.0  # the null block
    blocks = np.random.default_rng(1).permutation(np.arange(1, 256, dtype=np.int32))
    first, *more = np.split(blocks[: 10 * len(layout.windows)][None], len(layout.windows), axis=1)
    logits, start = [], 0
    for size in sizes:
        logits.append(
            model.forward(
                torch.tensor(token_ids[start : start + size]),
                torch.arange(start, start + size),
                cache=cache,
                plan=AttentionPlan(
                    np.array([size]), np.array([start]), first, BLOCK_SIZE, tuple(more)
                ),
                rows=torch.arange(size),
            )
        )
        start += size
    return torch.cat(logits)


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


@EVERY_FAMILY
def test_bfloat16_is_as_near_to_float32_as_in_transformers(
    folder_of: Callable[[str], Path], name: str
) -> None:
    folder = folder_of(name)
    (prompt,) = random_prompts(1, lengths=[150], vocab_size=VOCAB_SIZE)
    with torch.inference_mode():
        exact = load_reference(folder)(torch.tensor([prompt])).logits[0]
        theirs = load_reference(folder, torch.bfloat16)(torch.tensor([prompt])).logits[0].float()
        ours = our_logits(folder, prompt, [150], dtype=torch.bfloat16)
    assert (ours - exact).abs().mean() <= 1.1 * (theirs - exact).abs().mean()


@pytest.mark.slow
@EVERY_FAMILY
def test_bfloat16_chooses_the_best_token_as_often_as_transformers(
    folder_of: Callable[[str], Path], name: str
) -> None:
    """Of positions whose two best logits are no near tie: four steps of bfloat16 apart or more.

    Nearer ones are decided by rounding, in transformers too. So is the choice of experts.
    """
    folder = folder_of(name)
    prompts = random_prompts(4, lengths=[150], vocab_size=VOCAB_SIZE)
    with torch.inference_mode():
        reference, rounded = load_reference(folder), load_reference(folder, torch.bfloat16)
        exact = torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in prompts])
        theirs = torch.cat([rounded(torch.tensor([prompt])).logits[0] for prompt in prompts])
        ours = torch.cat([our_logits(folder, p, [150], dtype=torch.bfloat16) for p in prompts])
    best, second = exact.topk(2).values.unbind(dim=1)
    step = 2.0 ** (best.abs().log2().floor() - 7)
    is_clear = best - second > 4 * step
    chosen = exact.argmax(dim=1)[is_clear]
    ours_right, theirs_right = (
        float((logits.argmax(dim=1)[is_clear] == chosen).float().mean())
        for logits in (ours, theirs)
    )
    assert len(chosen) > 0.75 * len(exact)
    assert ours_right >= min(0.995, theirs_right)
