"""Rotary position embedding: the table of angles, plain or scaled, and its application.

Angles are float32 (Su et al. 2021, in the half-split layout of Hugging Face); the llama3 scaling
is that of Llama 3.1.
"""

from __future__ import annotations

import math

import torch

from worker.model.rope_config import RopeConfig


def rotary_table(rope: RopeConfig, *, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return cosines and sines, [2, num_positions, head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = _scaled(1.0 / rope.theta**exponents, rope)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by cos, sin [tokens, 1, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return rotated.to(x.dtype)


def _scaled(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    if rope.kind == "default":
        return frequencies
    if rope.kind == "none":
        return torch.zeros_like(frequencies)
    if rope.kind == "linear":
        return frequencies / rope.factor
    # llama3: long waves are slowed by `factor`, short ones kept, those between interpolated.
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / rope.factor)
