"""The model's logits equal those of transformers on the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker.logit_fixtures import NUM_POSITIONS, logits_of
from tests.worker.model_fixtures import VOCAB_SIZE, load_reference, random_prompts, write_tiny_model
from worker.model.config import read_model_config
from worker.model.load_llama import load_llama
from worker.model.lora import NO_ADAPTERS, BatchAdapters

MAX_DIFFERENCE = 1e-3

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def our_logits(
    folder: Path,
    token_ids: list[int],
    chunk_sizes: list[int],
    *,
    adapters: BatchAdapters = NO_ADAPTERS,
    compiled: bool | None = None,
) -> torch.Tensor:
    """Compute all logits of a prompt, chunk by chunk, over scattered blocks."""
    model = load_llama(
        folder,
        read_model_config(folder),
        dtype=torch.float32,
        num_positions=NUM_POSITIONS,
        compiled=compiled,
    )
    return logits_of(model, token_ids, chunk_sizes, adapters=adapters)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
        ),
        ("mistral", {}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
)
def test_logits_equal_transformers_in_one_chunk_and_in_many(
    tmp_path: Path, family: str, overrides: dict[str, object]
) -> None:
    folder = write_tiny_model(tmp_path, family=family, **overrides)
    (prompt,) = random_prompts(1, lengths=[150], vocab_size=VOCAB_SIZE)
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([prompt])).logits[0]
        whole = our_logits(folder, prompt, [150])
        chunked = our_logits(folder, prompt, [1, 40, 16, 93])
    assert (whole - expected).abs().max() <= MAX_DIFFERENCE
    assert (chunked - expected).abs().max() <= MAX_DIFFERENCE
