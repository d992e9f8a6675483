"""Rotates queries and keys by their positions, in place.

Half-split layout, angles from a float32 table (worker.model.rotary).
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker.kernels.jit import check_contiguous, check_launchable, kernel, next_power_of_2


def rotate(
    qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, num_rotated: int
) -> None:
    """Rotate the first `num_rotated` heads of qkv [tokens, heads, head_dim], contiguous.

    positions [tokens], of any integer type; table [2, positions, head_dim / 2] float32, cosines
    then sines.
    """
    check_contiguous(qkv, table)
    check_launchable(qkv, positions, table)
    num_tokens, num_heads, head_dim = qkv.shape
    half = head_dim // 2
    _rotate[(num_tokens,)](
        qkv,
        positions,
        table,
        table.stride(0),
        NUM_HEADS=num_heads,
        NUM_ROTATED=num_rotated,
        HALF=half,
        HEADS=next_power_of_2(num_rotated),
        COLUMNS=next_power_of_2(half),
    )


@kernel()
def _rotate(
    qkv: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    sine_offset: int,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    head = tl.arange(0, HEADS)
    angle = table + tl.load(positions + token) * HALF + column
    cos = tl.load(angle, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(angle + sine_offset, mask=column < HALF, other=0.0)[None, :]
    low_at = qkv + (token * NUM_HEADS + head[:, None]) * (2 * HALF) + column[None, :]
    inside = (head < NUM_ROTATED)[:, None] & (column < HALF)[None, :]
    low = tl.load(low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(low_at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = qkv.dtype.element_ty
    tl.store(low_at, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(low_at + HALF, (high * cos + low * sin).to(dtype), mask=inside)
