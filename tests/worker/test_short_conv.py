"""Short convolutions: which inputs a token reads, which states are kept, and what does not fit."""

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
from worker.model.kv_layout import check_state_size, kv_layout
from worker.model.short_conv import convolve, state_plan

KERNEL = 3
CHANNELS = 4
TAPS = torch.arange(1.0, 1.0 + KERNEL * CHANNELS).view(KERNEL, CHANNELS)


def plan_of(counts: list[int], computed: list[int], tables: list[list[int]]) -> AttentionPlan:
    return AttentionPlan(
        np.array(counts), np.array(computed), np.array(tables, np.int32), block_size=4
    )


def test_a_state_is_kept_at_the_end_of_each_held_block_and_of_the_chunk() -> None:
    # The first request goes on after five tokens and reaches the end of its block 1, skips block 2
    # and stops inside block 3; the second one begins.
    plan = state_plan(plan_of([9, 2], [5, 0], [[7, 8, 0, 9], [3, 0, 0, 0]]), group=0, kernel=KERNEL)
    assert plan.read_blocks.tolist() == [8, 0]
    assert plan.kept_blocks.tolist() == [8, 9, 3]
    # Inputs 0 to 3 are those of the two states, from 4 on those of the batch.
    assert plan.inputs[0].tolist() == [0, 1, 4]
    assert plan.inputs[8].tolist() == [10, 11, 12]
    assert plan.inputs[9].tolist() == [2, 3, 13]
    assert plan.kept_inputs.tolist() == [[5, 6], [11, 12], [13, 14]]


def test_however_a_text_is_cut_its_convolution_and_its_states_are_the_same() -> None:
    text = torch.randn(14, CHANNELS, generator=torch.Generator().manual_seed(0))
    table = [[5, 2, 6, 1]]

    def run(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        memory, parts, start = torch.zeros(8, 16), [], 0
        for size in sizes:
            plan = state_plan(plan_of([size], [start], table), group=0, kernel=KERNEL)
            parts.append(convolve(text[start : start + size], TAPS, memory, plan))
            start += size
        return torch.cat(parts), memory

    whole, states = run([14])
    for sizes in ([1] * 14, [1, 7, 4, 2], [4, 4, 6]):
        result, memory = run(sizes)
        assert torch.equal(result, whole)
        assert torch.equal(memory, states)
    expected = TAPS[0] * text[3] + TAPS[1] * text[4] + TAPS[2] * text[5]
    assert torch.allclose(whole[5], expected)
    assert torch.equal(states[5, : 2 * CHANNELS], text[2:4].flatten())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family, overrides = FAMILIES["lfm2"]
    return write_tiny_model(tmp_path / "lfm2", family=family, **overrides)


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def test_states_have_a_cache_group_of_their_own(folder: Path) -> None:
    config = read_model_config(folder)
    layout = kv_layout(config.num_layers, config.windows)
    assert layout.groups == (LinearState(), FullAttention())
    assert [place.group for place in layout.places] == [0, 0, 1, 0, 1]
    assert executor_for(folder).info.kv_groups == layout.groups


def test_older_spellings_of_layers_and_widths_are_read(folder: Path) -> None:
    expected = read_model_config(folder)
    assert expected.intermediate_size == 96  # two thirds of 128, up to a multiple of 16
    change_config(
        folder, layer_types=None, full_attn_idxs=[2, 4], intermediate_size=None, block_ff_dim=128
    )
    assert read_model_config(folder) == expected
    change_config(folder, block_auto_adjust_ff_dim=False)
    assert read_model_config(folder).intermediate_size == 128


def test_what_is_not_computed_is_refused(folder: Path) -> None:
    change_config(folder, conv_bias=True)
    with pytest.raises(ConfigError, match="conv_bias=True is not supported, only False"):
        read_model_config(folder)
    change_config(folder, conv_bias=False, layer_types=["conv", "mamba", *["full_attention"] * 3])
    with pytest.raises(ConfigError, match=r"layer_types=.* is not supported"):
        read_model_config(folder)


def test_a_block_without_room_for_a_state_is_refused(folder: Path) -> None:
    config = read_model_config(folder)
    with pytest.raises(
        ConfigError,
        match=r"block_size 4 has no room for a state of Lfm2ForCausalLM; set it to 5 or more",
    ):
        check_state_size(config, num_channels=config.hidden_size, block_size=4)
