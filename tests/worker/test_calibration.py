"""What is rounded less, because of what a model is like, is found without a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.logit_fixtures import NUM_POSITIONS, logits_of
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    WIDE,
    random_prompts,
    store_in_bfloat16,
    write_tiny_model,
)
from worker.cpu.compiled.vector_code import MULTIPLIES_PAIRS
from worker.cpu.hadamard import HADAMARD_SIZE, hadamard
from worker.model import load_llama as loader
from worker.model.calibration import NUM_FINE, Calibration, calibrate
from worker.model.config import read_model_config
from worker.model.llama import LlamaModel

needs_pairs = pytest.mark.skipif(
    not MULTIPLIES_PAIRS, reason="this CPU does not multiply pairs of bfloat16"
)
HEAD_DIM = WIDE["head_dim"]
LOUD_GATED = list(range(3, 128, 8))
LOUD = list(range(5, 5 + 3 * NUM_FINE, 3))
(PROMPT,) = random_prompts(1, lengths=[100], vocab_size=VOCAB_SIZE)


def changed(
    folder: Path, change: Callable[[str, torch.Tensor], None], *, family: str = "llama"
) -> Path:
    """Return a model in bfloat16 whose weights, given by name, were changed."""
    write_tiny_model(folder, family=family, **WIDE)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        change(name, weight)
    save_file(weights, file, metadata={"format": "pt"})
    store_in_bfloat16(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose norms are 30 times as large in LOUD as elsewhere.

    Its queries are weak: a steep softmax would make more of any error than of which it is.
    """

    def change(name: str, weight: torch.Tensor) -> None:
        if "norm" in name:
            weight[LOUD] *= 30
        if "q_proj" in name:
            weight *= 0.01

    return changed(tmp_path, change)


def load(folder: Path, dtype: torch.dtype) -> LlamaModel:
    return loader.load_llama(
        folder,
        read_model_config(folder),
        dtype=dtype,
        num_positions=NUM_POSITIONS,
        compiled=True,
        deterministic=True,
    )


def found_in(model: LlamaModel) -> Calibration:
    return calibrate(
        model.config,
        embedding=model._embedding,
        layers=model._layers,
        final_norm=model._final_norm,
        head=model._head,
    )


def error_with(folder: Path, patch: pytest.MonkeyPatch, **fields: torch.Tensor) -> torch.Tensor:
    """Return the root mean square error of logits in pairs, some of what is found replaced."""
    exact = load(folder, torch.float32)
    found = replace(found_in(exact), **fields)
    with patch.context() as context:
        context.setattr(loader, "calibrate", lambda *_, **__: found)
        logits = logits_of(load(folder, torch.bfloat16), PROMPT, [100])
    return (logits - logits_of(exact, PROMPT, [100])).square().mean().sqrt()


def test_the_loudest_channels_of_every_norm_are_found(folder: Path) -> None:
    model = load(folder, torch.float32)
    num_norms = 2 * model.config.num_layers + 1
    assert found_in(model).fine_channels.tolist() == [LOUD] * num_norms


@needs_pairs
def test_two_terms_for_them_leave_less_error_than_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_norms = 2 * read_model_config(folder).num_layers + 1
    others = torch.arange(NUM_FINE).mul(3).repeat(num_norms, 1)
    coarse = error_with(folder, monkeypatch, fine_channels=others)
    assert error_with(folder, monkeypatch) < coarse * 0.8


@pytest.fixture
def folder_with_loud_gates(tmp_path: Path) -> Path:
    """A model whose down multiplies numbers 100 times as large in LOUD_GATED as elsewhere.

    Nothing else is rounded: attention adds nothing, and norms have no other channels than LOUD.
    """

    def change(name: str, weight: torch.Tensor) -> None:
        if "norm" in name:
            weight[[i for i in range(len(weight)) if i not in LOUD]] = 0
        if "o_proj" in name:
            weight.zero_()
        if "up_proj" in name:
            weight[LOUD_GATED] *= 100

    return changed(tmp_path, change)


def test_the_loudest_channels_that_down_multiplies_are_found(folder_with_loud_gates: Path) -> None:
    found = found_in(load(folder_with_loud_gates, torch.float32)).fine_gated
    assert all(set(LOUD_GATED) <= set(layer) for layer in found.tolist())


@needs_pairs
def test_two_terms_for_what_down_multiplies_leave_less_error(
    folder_with_loud_gates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_in(load(folder_with_loud_gates, torch.float32))
    inner = read_model_config(folder_with_loud_gates).intermediate_size
    others = [sorted(set(range(inner)) - set(layer)) for layer in found.fine_gated.tolist()]
    coarse = error_with(folder_with_loud_gates, monkeypatch, fine_gated=torch.tensor(others))
    assert error_with(folder_with_loud_gates, monkeypatch) < coarse * 0.8


@pytest.fixture
def folder_with_bias(tmp_path: Path) -> Path:
    """A model whose keys share a large number in the channel that turns slowest."""

    def change(name: str, weight: torch.Tensor) -> None:
        if "k_proj.bias" in name:
            weight.view(-1, HEAD_DIM)[:, -1] = 100

    return changed(tmp_path, change, family="qwen2")


def test_what_all_keys_of_a_head_share_is_found(folder_with_bias: Path) -> None:
    offsets = hadamard(found_in(load(folder_with_bias, torch.float32)).key_offsets)
    shared = -offsets / HADAMARD_SIZE
    assert (shared[..., -1] - 100).abs().max() < 5
    assert shared[..., : HEAD_DIM // 2 - 1].abs().max() < 20


@needs_pairs
def test_keys_without_what_they_share_leave_less_error(
    folder_with_bias: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_in(load(folder_with_bias, torch.float32))
    nothing = torch.zeros_like(found.key_offsets)
    kept = error_with(folder_with_bias, monkeypatch, key_offsets=nothing)
    assert error_with(folder_with_bias, monkeypatch) < kept * 0.8
