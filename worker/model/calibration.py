"""Finds what compiled steps need to know of a model where they round to bfloat16.

A few channels of what is multiplied are far larger than the others, or meet larger weights, and
the keys of a head have much in common. Both depend on the model, hardly on the text, so tokens
drawn by chance show them. It knows no step that uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.cpu.attention import AttentionPlan
from worker.cpu.hadamard import hadamard
from worker.cpu.linear import Weight
from worker.model.config import ModelConfig
from worker.model.llama import KVCache, Layer, LlamaModel
from worker.model.lora import BatchAdapters, Projection

NUM_FINE = 16
"""Channels of each norm: a vector of the CPUs that multiply bfloat16."""

NUM_FINE_GATED = 64
"""Channels of what down multiplies; it has more of them, and less in few of them."""

_ROWS = 1024
_NUM_TOKENS = 32
_SEED = 0
_APART = 32
"""Positions between two tokens: keys are to have in common what does not turn with them."""


@dataclass(frozen=True)
class Calibration:
    """What was found; always the same for the same weights.

    `fine_channels` [2 * layers + 1, NUM_FINE] int64 are those of each norm in the order of a step
    whose squares, times the squares of the weights they meet, are largest in the mean: rounding
    errs in proportion. Ascending. `fine_gated` [layers, at most NUM_FINE_GATED] are the same of
    what down multiplies. `key_offsets` [layers, kv_heads, head_dim] float32, added to rotated and
    transformed keys (worker.cpu.hadamard), remove their mean: what all keys share moves all scores
    of a query alike, which a softmax does not see.
    """

    fine_channels: torch.Tensor
    fine_gated: torch.Tensor
    key_offsets: torch.Tensor


def calibrate(
    config: ModelConfig,
    *,
    embedding: torch.Tensor,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    head: torch.Tensor,
) -> Calibration:
    """Run tokens drawn by chance through plain operations in float32."""
    model = _Watched(
        config,
        embedding=embedding,
        layers=list(layers),
        final_norm=final_norm,
        head=head,
        num_positions=_NUM_TOKENS * _APART,
        dtype=torch.float32,
    )
    of_norms, of_gated, keys = model.watch()
    weights = [weight for layer in layers for weight in (layer.qkv, layer.gate_up)]
    norms = zip(of_norms, (*weights, head), strict=True)
    gated = zip(of_gated, (layer.down for layer in layers), strict=True)
    return Calibration(
        torch.stack([_fine(*each, NUM_FINE) for each in norms]),
        torch.stack([_fine(*each, NUM_FINE_GATED) for each in gated]),
        -hadamard(keys.mean(dim=1)),
    )


def _fine(squares: torch.Tensor, weight: Weight, count: int) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor), "eight bits are not multiplied in bfloat16"
    errors = squares * _squares_of_columns(weight)
    return errors.topk(min(count, len(errors))).indices.sort().values


def _squares_of_columns(weight: torch.Tensor) -> torch.Tensor:
    """Sum up the squares of each column, [depth], by parts that stay in the cache when widened."""
    parts = [part.float().square().sum(dim=0) for part in torch.split(weight, _ROWS)]
    return torch.stack(parts).sum(dim=0)


@dataclass(frozen=True)
class _NoAdapters(BatchAdapters):
    """Keeps the mean square of each channel of what down multiplies, [inner] for each layer."""

    gated: list[torch.Tensor] = field(default_factory=list)

    def add(
        self, layer: int, projection: Projection, x: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        if projection == "down":
            self.gated.append(x.square().mean(dim=0))
        return output


class _Watched(LlamaModel):
    """A model in plain operations that keeps the mean square of each channel of each norm."""

    def watch(self) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Return squares of norms in order and of what down multiplies, one tensor each, and keys.

        Keys are [layers, tokens, kv_heads, head_dim].
        """
        self._squares: list[torch.Tensor] = []
        adapters = _NoAdapters(())
        config, block = self.config, np.ones((1, 1), np.int32)
        generator = torch.Generator().manual_seed(_SEED)
        shape = (config.num_layers, 2, _NUM_TOKENS, config.num_kv_heads, config.head_dim)
        cache = KVCache(torch.zeros(shape), torch.zeros(shape))
        with torch.inference_mode():
            self.forward(
                torch.randint(config.vocab_size, (_NUM_TOKENS,), generator=generator),
                torch.arange(_NUM_TOKENS) * _APART,
                cache=cache,
                plan=AttentionPlan(np.array([_NUM_TOKENS]), np.array([0]), block, _NUM_TOKENS),
                rows=torch.arange(_NUM_TOKENS),
                adapters=adapters,
            )
        return self._squares, adapters.gated, cache.keys[:, 1]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = super()._norm(x, weight)
        self._squares.append(normed.square().mean(dim=0))
        return normed
