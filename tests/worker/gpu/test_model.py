"""The GPU model computes what the CPU model does: eagerly, in graphs, in pieces, padded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.gpu.gpu_fixtures import FakeGraphs, gpu_model
from tests.worker.model_fixtures import write_tiny_model
from worker.cpu.attention import AttentionPlan
from worker.gpu.dispatcher import CudaGraphMode
from worker.gpu.model import GpuModel
from worker.model.causal_lm import CausalLM
from worker.model.config import read_model_config
from worker.model.llama import KVCache
from worker.model.load import load_model

BLOCK_SIZE = 4
TABLES = np.array([[3, 9, 1, 7], [2, 5, 0, 0], [8, 4, 6, 0]], np.int32)
TOKENS = np.random.default_rng(5).integers(0, 320, (3, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def new_cache(model: CausalLM) -> KVCache:
    config = model.config
    shape = (config.num_layers, 10, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return KVCache(torch.zeros(shape), torch.zeros(shape))


def step(model: CausalLM, cache: KVCache, computed: list[int], queries: list[int]) -> torch.Tensor:
    """Compute the next tokens of requests 0, 1, ...; return the logits of all of them."""
    spans = [(i, c, c + q) for i, (c, q) in enumerate(zip(computed, queries, strict=True))]
    positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
    plan = AttentionPlan(
        num_queries=np.array(queries),
        num_computed=np.array(computed),
        block_tables=TABLES[: len(queries)],
        block_size=BLOCK_SIZE,
    )
    return model.forward(
        torch.from_numpy(np.concatenate([TOKENS[i, start:end] for i, start, end in spans])),
        torch.from_numpy(positions),
        cache=cache,
        plan=plan,
        rows=torch.arange(len(positions)),
    )


STEPS = [([0, 0], [4, 1]), ([4, 1], [1, 1]), ([5, 2], [2, 1]), ([7], [1])]


def assert_equal_passes(model: GpuModel, folder: Path, cache: KVCache) -> None:
    config = read_model_config(folder)
    truth = load_model(folder, config, dtype=torch.float32, num_positions=128)
    expected_cache = new_cache(truth)
    for computed, queries in STEPS:
        expected = step(truth, expected_cache, computed, queries)
        torch.testing.assert_close(step(model, cache, computed, queries), expected)
    for ours, theirs in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
        torch.testing.assert_close(ours[:, 1:], theirs[:, 1:], rtol=1e-4, atol=1e-5)
        assert not ours[:, 0].any(), "the null block was written"


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("qwen2", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
    ],
)
def test_eager_passes_equal_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family=family)
    graphs = FakeGraphs()
    model = gpu_model(folder, graphs=graphs)
    with torch.inference_mode():
        assert_equal_passes(model, folder, new_cache(model))
    assert graphs.graphs == []


@pytest.mark.parametrize(
    ("mode", "num_graphs", "num_replays"),
    [
        # Steps of 5, 2, 3 and 1 tokens; three pieces lie around two attentions.
        pytest.param("piecewise", 2 * 3, 3 * 3, marks=pytest.mark.slow),
        pytest.param("full_decode_only", 1, 2, marks=pytest.mark.slow),
        ("full_and_piecewise", 1 + 2 * 3, 2 + 3),
        pytest.param("full", 1 + 2, 3, marks=pytest.mark.slow),
    ],
)
def test_passes_in_graphs_equal_those_of_the_cpu(
    mode: CudaGraphMode, num_graphs: int, num_replays: int, folder: Path
) -> None:
    graphs = FakeGraphs()
    model = gpu_model(folder, graphs=graphs, mode=mode, sizes=(2, 4), max_num_seqs=2)
    cache = new_cache(model)
    with torch.inference_mode():
        for key in model.dispatcher.all_keys():
            model.capture(key, cache)
        captured = graphs.num_replays
        assert_equal_passes(model, folder, cache)
    assert len(graphs.graphs) == num_graphs
    assert graphs.num_replays - captured == num_replays
