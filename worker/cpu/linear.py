"""Matrix products of activations with weights, by the path that is fast on a CPU.

Weights stay [out, in] as checkpoints store them. It knows no model: only shapes and precisions.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

from worker.cpu.eight_bit import EightBitWeight
from worker.cpu.machine import has_native_bfloat16

Weight = torch.Tensor | EightBitWeight
"""One with eight bits has a scale per row."""

_NARROW = 64
"""Up to this many rows a float32 product is limited by reading the weight, not by arithmetic."""

_COPIES = 4
"""A single row is computed this often: a narrow matrix product reads the weight faster than a
vector product does, and one row then goes through the same kernel as a batch."""

_FEW = 8
"""Up to this many rows bfloat16 without matrix instructions beats widening the weight."""

_WIDEN_ROWS = 4096
"""Weight rows widened at a time, so that the float32 copy stays in the cache."""


@cache
def _native_bfloat16() -> bool:
    return has_native_bfloat16()


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias; x [rows, in], weight [out, in], result [rows, out] like x.

    A weight in bfloat16 under float32 activations, or in eight bits, counts as widened.
    """
    if isinstance(weight, EightBitWeight) or x.dtype != weight.dtype:
        product = _linear_widened(x, weight)
    elif x.dtype == torch.float32:
        product = _linear_float32(x, weight)
    elif _native_bfloat16() or x.shape[0] <= _FEW:
        product = F.linear(x, weight)
    else:
        product = _linear_widened(x, weight)
    return product if bias is None else product + bias.to(x.dtype)


def _linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if rows > _NARROW:
        return F.linear(x, weight)
    columns = x.repeat(_COPIES, 1).t() if rows == 1 else x.t()
    return torch.mm(weight, columns).t()[:rows]


def _linear_widened(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Multiply in float32, whatever the operands' precision, and round the result once to x's."""
    wide = x.float()
    starts = range(0, len(weight), _WIDEN_ROWS)
    parts = [F.linear(wide, weight[i : i + _WIDEN_ROWS].float()).to(x.dtype) for i in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
