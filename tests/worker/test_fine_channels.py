"""Channels that rounding would harm most are found without a text, and multiplied in two terms."""

from __future__ import annotations

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
from worker.model import load_llama as loader
from worker.model.config import read_model_config
from worker.model.fine_channels import NUM_FINE, fine_channels
from worker.model.llama import LlamaModel

LOUD = list(range(5, 5 + 3 * NUM_FINE, 3))
(PROMPT,) = random_prompts(1, lengths=[100], vocab_size=VOCAB_SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose norms are 30 times as large in LOUD as elsewhere.

    Its queries are weak: a steep softmax would make more of any error than of which it is.
    """
    folder = write_tiny_model(tmp_path, **WIDE)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "norm" in name:
            weight[LOUD] *= 30
        if "q_proj" in name:
            weight *= 0.01
    save_file(weights, file, metadata={"format": "pt"})
    store_in_bfloat16(folder)
    return folder


def load(folder: Path, dtype: torch.dtype) -> LlamaModel:
    return loader.load_llama(
        folder,
        read_model_config(folder),
        dtype=dtype,
        num_positions=NUM_POSITIONS,
        compiled=True,
        deterministic=True,
    )


def found_in(model: LlamaModel) -> torch.Tensor:
    return fine_channels(
        model.config,
        embedding=model._embedding,
        layers=model._layers,
        final_norm=model._final_norm,
        head=model._head,
    )


def test_the_loudest_channels_of_every_norm_are_found(folder: Path) -> None:
    model = load(folder, torch.float32)
    num_norms = 2 * model.config.num_layers + 1
    assert found_in(model).tolist() == [LOUD] * num_norms


@pytest.mark.skipif(not MULTIPLIES_PAIRS, reason="this CPU does not multiply pairs of bfloat16")
def test_two_terms_for_them_leave_less_error_than_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits_of(load(folder, torch.float32), PROMPT, [100])
    fine = logits_of(load(folder, torch.bfloat16), PROMPT, [100])
    num_norms = 2 * read_model_config(folder).num_layers + 1
    others = torch.arange(NUM_FINE).mul(3).repeat(num_norms, 1)
    monkeypatch.setattr(loader, "fine_channels", lambda *_, **__: others)
    coarse = logits_of(load(folder, torch.bfloat16), PROMPT, [100])
    errors = [(each - expected).square().mean().sqrt() for each in (fine, coarse)]
    assert errors[0] < errors[1] * 0.8
