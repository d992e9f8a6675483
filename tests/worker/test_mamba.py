"""Mamba mixers on a batch: which tokens are scanned together, and where their states are kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kv_groups.spec import FullAttention, LinearState
from kvindex.foundation.errors import ConfigError
from tests.worker.model_fixtures import FAMILIES, executor_for, write_tiny_model
from worker.cpu.attention import AttentionPlan
from worker.model.config import read_model_config
from worker.model.kv_layout import attention_block_size, kv_layout
from worker.model.mamba import Passage, StateMemory, Stretch, mamba_plan
from worker.model.mamba_config import MambaConfig
from worker.model.shard import check_parallel_size

SHAPE = MambaConfig(
    num_heads=4, head_dim=8, state_size=16, num_groups=2, kernel=4, has_conv_bias=True
)


def plan_of(counts: list[int], computed: list[int], tables: list[list[int]]) -> AttentionPlan:
    return AttentionPlan(
        np.array(counts), np.array(computed), np.array(tables, np.int32), block_size=4
    )


def test_stretches_end_where_states_are_kept_and_single_tokens_advance_together() -> None:
    # The second request goes on in block 1 and skips block 2; the others take one token each.
    plan = mamba_plan(
        plan_of([1, 9, 1], [3, 5, 0], [[7, 0, 0, 0], [5, 8, 0, 9], [3, 0, 0, 0]]),
        group=0,
        kernel=4,
    )
    assert plan.states.read_blocks.tolist() == [7, 8, 0]
    assert plan.single_rows.tolist() == [0, 10]
    assert plan.single_reads.tolist() == [7, 0]
    assert plan.single_keeps.tolist() == [7, 3]
    assert plan.passages == [Passage(8, [Stretch(1, 4, kept_block=8), Stretch(4, 10, 9)])]


def test_long_texts_are_scanned_in_stretches_of_32() -> None:
    plan = mamba_plan(plan_of([75], [0], [[*[0] * 18, 2]]), group=0, kernel=4)
    (passage,) = plan.passages
    assert passage.stretches == [Stretch(0, 32, None), Stretch(32, 64, None), Stretch(64, 75, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_float32_and_goes_on_among_the_values(dtype: torch.dtype) -> None:
    num_tokens = -(-SHAPE.state_bytes(dtype.itemsize) // (2 * 2 * 8 * dtype.itemsize))
    keys, values = (torch.zeros(3, num_tokens, 2, 8, dtype=dtype) for _ in range(2))
    memory = StateMemory(keys, values, SHAPE)
    states = torch.randn(2, 4, 8, 16)
    memory.write(torch.tensor([2, 1]), states)
    num_inputs = 3 * SHAPE.num_channels
    memory.inputs[:, :num_inputs] = 1.0
    assert torch.equal(memory.read(torch.tensor([1, 2])), states.flip(0))
    assert memory.inputs[0, num_inputs:].count_nonzero() == 0
    assert values[0].count_nonzero() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family, overrides = FAMILIES["granite with mamba"]
    return write_tiny_model(tmp_path / "granite", family=family, **overrides)


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def test_blocks_of_attention_grow_until_a_state_fits(folder: Path) -> None:
    config = read_model_config(folder)
    # 24 * 6 * 16 numbers of the scan and 3 * 208 inputs; a token takes 2 * 2 * 16.
    assert attention_block_size(config, block_size=16, itemsize=4) == 48
    assert attention_block_size(config, block_size=16, itemsize=2) == 96
    assert attention_block_size(config, block_size=100, itemsize=4) == 100
    layout = kv_layout(config.num_layers, config.windows, attention_block_size=48)
    assert layout.groups == (
        LinearState(),
        LinearState(),
        LinearState(),
        FullAttention(block_size=48),
    )
    assert executor_for(folder).info.kv_groups == layout.groups


def test_granite_4_micro_takes_a_block_of_attention_for_a_thousand_tokens(folder: Path) -> None:
    change_config(
        folder,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        mamba_n_heads=64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
    )
    config = read_model_config(folder)
    assert config.mamba is not None
    assert config.mamba.num_state_items == 524_288
    assert attention_block_size(config, block_size=16, itemsize=2) == 1_040


def test_other_spellings_of_layers_are_read(folder: Path) -> None:
    expected = read_model_config(folder)
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2 + ["linear_attention"]
    change_config(folder, layer_types=kinds, position_embedding_type="nope")
    assert read_model_config(folder) == expected
    change_config(folder, layer_types=None, layers_block_type=kinds, mamba_d_head="auto")
    assert read_model_config(folder) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["conv"] * 7}, r"layer_types=.* is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True is not supported, only False"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit=\[0.0, 0.1\] is not supported"),
        ({"normalization_function": "layernorm"}, "only 'rmsnorm'"),
        ({"position_embedding_type": "alibi"}, "only 'rope', 'nope'"),
        ({"mamba_d_head": 32}, "mamba_n_heads=6 heads of mamba_d_head=32 .* do not make"),
        ({"mamba_n_groups": 4}, "mamba_n_groups=4 do not make"),
        (
            {"num_local_experts": 4, "quantization_config": {"quant_method": "fp8"}},
            "quantization_config=.* is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    folder: Path, fields: dict[str, object], message: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(ConfigError, match=message):
        read_model_config(folder)


@pytest.mark.parametrize("name", ["granite with mamba", "granite with mamba and experts"])
def test_several_ranks_are_refused(tmp_path: Path, name: str) -> None:
    family, overrides = FAMILIES[name]
    config = read_model_config(write_tiny_model(tmp_path, family=family, **overrides))
    check_parallel_size(config, 1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: .* runs on one rank only"):
        check_parallel_size(config, 2)
