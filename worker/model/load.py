"""Chooses what computes a model, and loads it."""

from __future__ import annotations

from pathlib import Path

import torch

from kvindex.foundation.errors import ConfigError
from worker.cpu.compiled.choose import runs_compiled
from worker.model.causal_lm import CausalLM
from worker.model.config import ModelConfig
from worker.model.load_decoder import load_decoder
from worker.model.load_llama import load_llama
from worker.model.parallel import ALONE, RankGroup
from worker.model.transformers_model import load_transformers_model


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    num_positions: int,
    ranks: RankGroup = ALONE,
    deterministic: bool = False,
) -> CausalLM:
    """Load a folder, or the part that a rank holds.

    `deterministic`: a row's logits do not depend on the rows beside it, bit for bit.
    Raises DependencyError naming the tensor at fault, ConfigError for a model that transformers
    computes otherwise than with our attention, or that cannot be deterministic.
    """
    if deterministic and not (config.is_llama_like and ranks.size == 1 and runs_compiled(config)):
        raise ConfigError(
            "worker.deterministic needs numba and a Llama, Mistral or Qwen2 model on one rank"
        )
    if not config.is_native:
        return load_transformers_model(folder, config, dtype=dtype)
    if config.is_llama_like and ranks.size == 1:
        return load_llama(
            folder,
            config,
            dtype=dtype,
            num_positions=num_positions,
            deterministic=deterministic,
        )
    return load_decoder(folder, config, dtype=dtype, num_positions=num_positions, ranks=ranks)
