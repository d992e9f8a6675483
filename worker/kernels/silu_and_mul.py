"""The gate of a gated feed-forward layer: silu(gate) * up.

Arithmetic is float32; the result is rounded once.
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker.kernels.jit import ceil_div, check_contiguous, check_launchable, kernel

_COLUMNS = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for gate_up [tokens, 2 * inner], contiguous, gate first."""
    check_contiguous(gate_up)
    check_launchable(gate_up)
    rows, width = gate_up.shape
    inner = width // 2
    out = gate_up.new_empty(rows, inner)
    grid = (rows, ceil_div(inner, _COLUMNS))
    _silu_and_mul[grid](gate_up, out, INNER=inner, COLUMNS=_COLUMNS)
    return out


@kernel()
def _silu_and_mul(
    gate_up: tl.tensor, out: tl.tensor, INNER: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < INNER
    gate_at = gate_up + row * (2 * INNER) + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + INNER, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * INNER + column, product.to(out.dtype.element_ty), mask=inside)
