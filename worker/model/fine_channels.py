"""Finds the channels of each norm whose rounding to bfloat16 changes a model's products most.

A few channels are far larger than the others, or meet larger weights. Which ones depends on the
model, hardly on the text, so tokens drawn by chance show them. It knows no step that uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.cpu.attention import AttentionPlan
from worker.model.config import ModelConfig
from worker.model.llama import KVCache, Layer, LlamaModel

NUM_FINE = 16
"""A vector of the CPUs that multiply bfloat16."""

_ROWS = 1024
_NUM_TOKENS = 32
_SEED = 0


def fine_channels(
    config: ModelConfig,
    *,
    embedding: torch.Tensor,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    """Return NUM_FINE channels of each norm in the order of a step, [2 * layers + 1, NUM_FINE].

    They are those whose squares, times the squares of the weights they meet, are largest in the
    mean: rounding errs in proportion. Ascending, and always the same ones for the same weights.
    """
    model = _Watched(
        config,
        embedding=embedding,
        layers=list(layers),
        final_norm=final_norm,
        head=head,
        num_positions=_NUM_TOKENS,
        dtype=torch.float32,
    )
    weights = [weight for layer in layers for weight in (layer.qkv, layer.gate_up)]
    found = []
    for squares, weight in zip(model.squares_of_norms(), (*weights, head), strict=True):
        assert isinstance(weight, torch.Tensor), "eight bits are not multiplied in bfloat16"
        errors = squares * _squares_of_columns(weight)
        found.append(errors.topk(NUM_FINE).indices.sort().values)
    return torch.stack(found)


def _squares_of_columns(weight: torch.Tensor) -> torch.Tensor:
    """Sum up the squares of each column, [depth], by parts that stay in the cache when widened."""
    parts = [part.float().square().sum(dim=0) for part in torch.split(weight, _ROWS)]
    return torch.stack(parts).sum(dim=0)


class _Watched(LlamaModel):
    """A model in plain operations that keeps the mean square of each channel of each norm."""

    def squares_of_norms(self) -> list[torch.Tensor]:
        """Run tokens drawn by chance, and return [hidden_size] for each norm in order."""
        self._squares: list[torch.Tensor] = []
        config, block = self.config, np.ones((1, 1), np.int32)
        generator = torch.Generator().manual_seed(_SEED)
        shape = (config.num_layers, 2, _NUM_TOKENS, config.num_kv_heads, config.head_dim)
        with torch.inference_mode():
            self.forward(
                torch.randint(config.vocab_size, (_NUM_TOKENS,), generator=generator),
                torch.arange(_NUM_TOKENS),
                cache=KVCache(torch.zeros(shape), torch.zeros(shape)),
                plan=AttentionPlan(np.array([_NUM_TOKENS]), np.array([0]), block, _NUM_TOKENS),
                rows=torch.arange(_NUM_TOKENS),
            )
        return self._squares

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = super()._norm(x, weight)
        self._squares.append(normed.square().mean(dim=0))
        return normed
