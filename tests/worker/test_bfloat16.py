"""In bfloat16 every native family chooses the tokens that transformers chooses, and errs no more.

The models are small, but know their texts: the best logits of random ones lie so close together
that rounding decides between them, in transformers too. Every position counts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.worker.learned_model import NUM_TOKENS, TEXTS, write_learned_model
from tests.worker.logit_fixtures import NUM_POSITIONS, logits_of
from tests.worker.model_fixtures import FAMILIES, load_reference, rewrite_weights
from worker.model.causal_lm import CausalLM
from worker.model.config import ModelConfig, read_model_config
from worker.model.load import load_model
from worker.model.load_llama import load_llama

LLAMA_LIKE: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "mistral without windows": ("mistral", {}),
    "qwen2 without windows": ("qwen2", {}),
}
EVERY_FAMILY = {**LLAMA_LIKE, **FAMILIES}
EVERY_WAY = [
    *((name, False) for name in EVERY_FAMILY),
    *((name, True) for name in LLAMA_LIKE),
]
"""Name of the family, and whether all steps are compiled."""

MIN_AGREEMENT = 0.995
MAX_ERROR = 1.01
"""Of the error of transformers in bfloat16."""


@dataclass(frozen=True)
class Reference:
    """A folder, and what transformers says of every position of `TEXTS`, [positions, vocab]."""

    folder: Path
    exact: torch.Tensor
    rounded: torch.Tensor

    def error_of(self, logits: torch.Tensor) -> float:
        """Return how far logits are from float32, by the median, against transformers in bfloat16.

        A mean would measure the few positions where rounding decides between experts.
        """
        ours, theirs = (each.sub(self.exact).abs().median() for each in (logits, self.rounded))
        return float(ours / theirs)


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    root = tmp_path_factory.mktemp("learned")
    known: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in known:
            family, overrides = EVERY_FAMILY[name]
            folder = write_learned_model(root / str(len(known)), family=family, **overrides)
            known[name] = Reference(
                folder, *(reference_logits(folder, d) for d in (torch.float32, torch.bfloat16))
            )
        return known[name]

    return reference


def reference_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = load_reference(folder, dtype)(torch.tensor(TEXTS)[:, :-1]).logits
    return logits.flatten(0, 1).float()


def our_logits(
    folder: Path, *, config: ModelConfig | None = None, compiled: bool = False
) -> torch.Tensor:
    """Compute what a Reference holds in bfloat16; `config` in place of the folder's own."""
    config = config or read_model_config(folder)
    dtype = torch.bfloat16
    model: CausalLM
    if config.is_llama_like and not compiled:
        model = load_llama(folder, config, dtype=dtype, num_positions=NUM_POSITIONS, compiled=False)
    else:
        model = load_model(
            folder, config, dtype=dtype, num_positions=NUM_POSITIONS, deterministic=compiled
        )
    with torch.inference_mode():
        return torch.cat([logits_of(model, text[:-1], [100, NUM_TOKENS - 100]) for text in TEXTS])


def agreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return at how many of all positions the best tokens are the same."""
    return float((ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean())


@pytest.mark.parametrize(("name", "compiled"), EVERY_WAY)
def test_bfloat16_chooses_what_transformers_chooses_in_either_precision(
    reference_of: Callable[[str], Reference], name: str, compiled: bool
) -> None:
    reference = reference_of(name)
    ours = our_logits(reference.folder, compiled=compiled)
    assert len(ours) == 1500
    for theirs in (reference.exact, reference.rounded):
        assert agreement(ours, theirs) >= MIN_AGREEMENT
    assert reference.error_of(ours) <= MAX_ERROR


def with_theta(config: ModelConfig, theta: float) -> ModelConfig:
    return msgspec.structs.replace(config, rope=msgspec.structs.replace(config.rope, theta=theta))


def with_fields(**fields: object) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: msgspec.structs.replace(config, **fields)


@pytest.mark.parametrize(
    ("name", "misread"),
    [
        *(
            pytest.param(name, lambda config: with_theta(config, 20_000.0), id=f"rope of {name}")
            for name in EVERY_FAMILY
            if name not in ("gemma3", "lfm2", "granite with mamba")
        ),
        pytest.param("gemma3", with_fields(query_scale=None), id="scale of attention"),
        pytest.param("gemma3", with_fields(embedding_scale=1.0), id="scale of the embedding"),
        pytest.param("mistral", with_fields(windows=(23, 23)), id="window"),
        *(
            pytest.param(name, with_fields(residual_scale=1.0), id=f"residuals of {name}")
            for name in FAMILIES
            if name.startswith("granite with")
        ),
    ],
)
def test_a_model_that_is_computed_otherwise_chooses_otherwise(
    reference_of: Callable[[str], Reference],
    name: str,
    misread: Callable[[ModelConfig], ModelConfig],
) -> None:
    reference = reference_of(name)
    wrong = our_logits(reference.folder, config=misread(read_model_config(reference.folder)))
    assert agreement(wrong, reference.exact) < MIN_AGREEMENT
    assert reference.error_of(wrong) > MAX_ERROR


def test_a_convolution_that_is_computed_backwards_chooses_otherwise(
    reference_of: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_of("lfm2")
    shutil.copytree(reference.folder, tmp_path, dirs_exist_ok=True)
    name = "model.layers.3.conv.conv.weight"
    taps = load_file(tmp_path / "model.safetensors")[name]
    rewrite_weights(tmp_path, name, taps.flip(-1).contiguous())
    wrong = our_logits(tmp_path)
    assert agreement(wrong, reference.exact) < MIN_AGREEMENT
    assert reference.error_of(wrong) > MAX_ERROR
