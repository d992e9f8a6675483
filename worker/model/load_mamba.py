"""Loads what a Mamba-2 mixer has beside its two products.

It knows the names that checkpoints give to those tensors, not the layer around them.
"""

from __future__ import annotations

from typing import Protocol

import torch

from worker.model.mamba import MambaWeights
from worker.model.mamba_config import MambaConfig


class TakeTensor(Protocol):
    """Hands out a tensor of a layer by its name there, which must have the given shape."""

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor as stored; raises DependencyError naming it."""
        ...


def load_mamba(take: TakeTensor, config: MambaConfig, *, dtype: torch.dtype) -> MambaWeights:
    """Load a mixer's small tensors; what the scan reads becomes float32, the rest `dtype`."""
    channels, heads = config.num_channels, config.num_heads
    taps = take("mamba.conv1d.weight", channels, 1, config.kernel).squeeze(1)
    bias = take("mamba.conv1d.bias", channels).to(dtype) if config.has_conv_bias else None
    return MambaWeights(
        taps=taps.t().contiguous().to(dtype),
        conv_bias=bias,
        step_bias=take("mamba.dt_bias", heads).float(),
        decay=-take("mamba.A_log", heads).float().exp(),
        skip=take("mamba.D", heads).float(),
        norm=take("mamba.norm.weight", config.inner_size).float(),
    )
