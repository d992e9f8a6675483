"""Paged attention of prefill chunks and decode rows equals the reference, at odd shapes."""

from __future__ import annotations

import pytest
import torch

from tests.worker.gpu.kernel_cases import PagedCase
from worker.kernels.decode_attention import choose_num_splits, decode_attention
from worker.kernels.prefill_attention import prefill_attention

PREFILL = {
    "one token alone": PagedCase([1], [1]),
    "exactly a block": PagedCase([16], [16]),
    "across blocks": PagedCase([17, 33], [17, 33]),
    "a chunk after cached blocks": PagedCase([70], [5]),
    "chunks, decode rows and padding together": PagedCase([40, 1, 23, 0, 0], [30, 1, 1, 0, 0]),
    "one head per KV head": PagedCase([20, 3], [20, 3], num_heads=2, head_dim=16),
    "eight heads per KV head": PagedCase([19], [11], num_heads=8, num_kv_heads=1, head_dim=128),
    "head_dim 256": PagedCase([18], [9], num_heads=1, num_kv_heads=1, head_dim=256),
    "head_dim 80, blocks of 8": PagedCase([21], [7], num_heads=2, head_dim=80, block_size=8),
    "float16": PagedCase([35, 20], [35, 2], dtype=torch.float16),
}

DECODE = {
    "one token alone": PagedCase([1], [1]),
    "a block, a block and one, less than one": PagedCase([16, 17, 5], [1, 1, 1]),
    "padding among them": PagedCase([0, 30, 0], [1, 1, 1]),
    "one head per KV head": PagedCase([90], [1], num_heads=2, head_dim=16),
    "eight heads per KV head": PagedCase([70], [1], num_heads=8, num_kv_heads=1, head_dim=128),
    "head_dim 256": PagedCase([70], [1], num_heads=1, num_kv_heads=1, head_dim=256),
    "drafts: four queries each": PagedCase([4, 21, 131], [4, 4, 4]),
    "float16": PagedCase([35, 20], [1, 1], dtype=torch.float16),
}


def tolerance(case: PagedCase) -> float:
    return 1e-5 if case.dtype == torch.float32 else 2e-3


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_attention_equals_its_reference(name: str) -> None:
    case = PREFILL[name]
    tensors = case.tensors()
    prefill_attention(**tensors)
    torch.testing.assert_close(
        tensors["out"], case.expected(), atol=tolerance(case), rtol=tolerance(case)
    )


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("name", DECODE)
def test_decode_attention_equals_its_reference(name: str, num_splits: int) -> None:
    case = DECODE[name]
    tensors = case.tensors()
    del tensors["query_start"]
    decode_attention(**tensors, num_splits=num_splits)
    expected = case.expected()
    for i, context in enumerate(case.contexts):
        if context == 0:
            expected[i] = 0.0
    torch.testing.assert_close(tensors["out"], expected, atol=tolerance(case), rtol=tolerance(case))


def test_rows_beyond_the_last_query_are_left_alone() -> None:
    tensors = PagedCase([9, 9], [2, 2]).tensors()
    tensors["query_start"] = torch.tensor([0, 2, 2], dtype=torch.int32)
    tensors["context_lens"] = torch.tensor([9, 0], dtype=torch.int32)
    tensors["out"].fill_(7.0)
    prefill_attention(**tensors)
    assert (tensors["out"][2:] == 7.0).all()
    assert (tensors["out"][:2] != 7.0).all()


@pytest.mark.parametrize(
    ("num_requests", "max_context", "num_splits"),
    [(1, 8192, 32), (4, 8192, 8), (16, 8192, 2), (256, 8192, 1), (1, 1024, 4), (1, 16, 1)],
)
def test_contexts_are_split_until_the_device_is_busy_twice(
    num_requests: int, max_context: int, num_splits: int
) -> None:
    chosen = choose_num_splits(
        num_requests=num_requests, num_kv_heads=8, max_context=max_context, num_processors=132
    )
    assert chosen == num_splits
