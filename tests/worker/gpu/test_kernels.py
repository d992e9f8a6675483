"""Every kernel that is no attention equals its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.frontend.sampling_params import SamplingParams
from engine.output import NewRequestData
from worker.kernels import reference
from worker.kernels.jit import check_launchable
from worker.kernels.rms_norm import add_rms_norm, rms_norm
from worker.kernels.rotary import rotate
from worker.kernels.sampling import Draws, sample_tokens
from worker.kernels.silu_and_mul import silu_and_mul
from worker.kernels.store_kv import store_kv
from worker.model.rope_config import RopeConfig
from worker.model.rotary import rotary_table
from worker.runner.request_state import RequestTable
from worker.runner.sampler import sample
from worker.runner.sampling_state import SamplingTable

DTYPES = [torch.float32, torch.float16]
GENERATOR = torch.Generator()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    GENERATOR.manual_seed(sum(shape))
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 64), (2, 80)])
def test_keys_and_values_land_in_their_slots_and_padding_nowhere(
    heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    fused = randn(5, 2 * heads + 1, head_dim, dtype=dtype)
    key, value = fused[:, :heads], fused[:, heads : 2 * heads]
    slots = torch.tensor([4, 23, 0, 9, 3], dtype=torch.int32)
    keys, values, expected_keys, expected_values = (
        randn(6, 4, heads, head_dim, dtype=dtype) for _ in range(4)
    )
    store_kv(key, value, keys, values, slots)
    reference.store_kv(key, value, expected_keys, expected_values, slots.long())
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    assert torch.equal(keys[0], randn(6, 4, heads, head_dim, dtype=dtype)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 72, 576])
def test_norms_equal_their_references(width: int, dtype: torch.dtype) -> None:
    x, weight = randn(3, width, dtype=dtype), randn(width, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    ours, expected = randn(3, width, dtype=dtype) * 3, randn(3, width, dtype=dtype) * 3
    normed = add_rms_norm(x, ours, weight, 1e-5)
    torch.testing.assert_close(normed, reference.add_rms_norm(x, expected, weight, 1e-5))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_only_queries_and_keys_are_rotated(head_dim: int, dtype: torch.dtype) -> None:
    table = rotary_table(RopeConfig(theta=10_000.0), head_dim=head_dim, num_positions=40)
    positions = torch.tensor([0, 39, 7])
    ours, expected = (randn(3, 5, head_dim, dtype=dtype) for _ in "ab")
    rotate(ours, positions, table, num_rotated=3)
    reference.rotate(expected, positions, table, num_rotated=3)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[:, 3:], randn(3, 5, head_dim, dtype=dtype)[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [5, 128, 1536])
def test_gates_equal_their_reference(inner: int, dtype: torch.dtype) -> None:
    gate_up = randn(2, 2 * inner, dtype=dtype) * 4
    torch.testing.assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def drawn(logits: torch.Tensor, sampling: list[SamplingParams], positions: list[int]) -> list[int]:
    """Sample on the "device"; assert that the CPU's sampler chooses the same."""
    requests = RequestTable(max_num_seqs=len(sampling), max_model_len=1, block_size=1)
    table = SamplingTable(requests, vocab_size=logits.shape[1])
    for slot, parameters in enumerate(sampling):
        table.set(
            slot,
            NewRequestData(
                request_id=str(slot),
                token_ids=[0],
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=[[1]],
                sampling=parameters,
                choice=slot % 3,
            ),
        )
    rows = table.rows(np.arange(len(sampling)), np.array(positions))
    draws = Draws(
        temperature=torch.from_numpy(rows.temperature),
        seed=torch.from_numpy(rows.seed.view(np.int64)),
        choice=torch.from_numpy(rows.choice.view(np.int64)),
        position=torch.from_numpy(rows.position),
    )
    out = torch.zeros(len(sampling), dtype=torch.int64)
    sample_tokens(logits, draws, out)
    tokens: list[int] = out.tolist()
    assert tokens == sample(logits.float(), rows).tolist()
    return tokens


@pytest.mark.parametrize("vocab_size", [50, 4096, 10_001])
def test_tokens_are_those_of_the_cpu_sampler(vocab_size: int) -> None:
    logits = randn(24, vocab_size) * 2
    sampling = [
        SamplingParams(temperature=(0.0, 0.7, 1.0, 1.8)[i % 4], seed=2**63 + i if i % 2 else i)
        for i in range(24)
    ]
    tokens = drawn(logits, sampling, [i * i for i in range(24)])
    assert len(set(tokens)) > 12


def test_of_equal_logits_the_first_is_the_best() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [4100, 77, 8999]] = 3.0
    assert drawn(logits, [SamplingParams(temperature=0.0)], [0]) == [77]


@pytest.mark.parametrize("impossible", [-3e38, float("-inf")])
def test_impossible_tokens_are_never_drawn(impossible: float) -> None:
    logits = torch.full((8, 9000), impossible)
    logits[:, 4999] = 1.0
    assert drawn(logits, [SamplingParams(seed=i) for i in range(8)], list(range(8))) == [4999] * 8


def test_the_interpreter_is_kept_from_computing_in_bfloat16() -> None:
    with pytest.raises(ValueError, match="use float32 or float16"):
        check_launchable(torch.zeros(1, dtype=torch.bfloat16))
