"""Root-mean-square norm of rows, alone or after adding them to the residual stream.

Zhang and Sennrich 2019. Arithmetic is float32; each result is rounded once.
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker.kernels.jit import check_contiguous, check_launchable, kernel, next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of each row of x [tokens, hidden], contiguous."""
    check_contiguous(x)
    check_launchable(x, weight)
    out = torch.empty_like(x)
    rows, columns = x.shape
    padded = next_power_of_2(columns)
    _rms_norm[(rows,)](x, weight, out, eps, WIDTH=columns, COLUMNS=padded, num_warps=_warps(padded))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to `residual` in place, then return the norm of the sum; all [tokens, hidden].

    The norm is taken of the sum as it was rounded, as if the two were separate operations.
    """
    check_contiguous(x, residual)
    check_launchable(x, residual, weight)
    out = torch.empty_like(x)
    rows, columns = x.shape
    padded = next_power_of_2(columns)
    _add_rms_norm[(rows,)](
        x, residual, weight, out, eps, WIDTH=columns, COLUMNS=padded, num_warps=_warps(padded)
    )
    return out


def _warps(columns: int) -> int:
    """Return how many warps share a row: 8 to 16 elements per thread."""
    return min(16, max(1, columns // 512))


@kernel()
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    tl.store(out + row + column, (values * inverse * scale).to(out.dtype.element_ty), mask=inside)


@kernel()
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + row + column, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    tl.store(out + row + column, (values * inverse * scale).to(out.dtype.element_ty), mask=inside)
