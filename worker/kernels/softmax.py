"""The inner loop of paged attention: one tile of queries over part of one request's context.

Online softmax in base 2 (Milakov and Gimelshein 2018; Dao et al. 2022). It is called by the
kernels of prefill and decode, which decide what the tile is and what becomes of the sums.
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker.kernels.jit import check_contiguous, check_launchable, kernel, next_power_of_2

_TILE_BYTES = 16_384
"""Bytes of keys in a tile: two stages of keys and values fit 99 KiB of shared memory."""


def check_paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Assert the layouts that both kernels take; ValueError as check_launchable raises it."""
    assert query.stride()[1:] == (query.shape[-1], 1), "a row is not contiguous"
    assert block_tables.stride(1) == 1
    check_contiguous(key_cache, value_cache, out)
    check_launchable(query, key_cache, block_tables)


def tile_shape(key_cache: torch.Tensor) -> tuple[int, int]:
    """Return how many keys a tile holds and how wide a head is in it: N and D of `attend`."""
    padded_dim = max(16, next_power_of_2(key_cache.shape[-1]))
    return max(16, min(64, _TILE_BYTES // (padded_dim * key_cache.itemsize))), padded_dim


@kernel()
def attend(
    query: tl.tensor,
    position: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale: float,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (weighted values [M, D], largest score [M], sum of weights [M]), all float32.

    query [M, D]; a row at `position` [M] sees the tokens of [start, end) up to itself. `scale`
    includes log2(e). What lies at or beyond `end` is not read, so what it holds cannot matter.
    """
    column = tl.arange(0, D)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    values = tl.zeros([M, D], tl.float32)
    for first in range(start, end, N):
        token = first + tl.arange(0, N)
        exists = token < end
        block = tl.load(block_table + token // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + token % BLOCK_SIZE
        at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        inside = exists[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(key_cache + at, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        visible = exists[None, :] & (token[None, :] <= position[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        # A row that has seen nothing yet: any finite number keeps -inf minus -inf away.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weight, axis=1)
        v = tl.load(value_cache + at, mask=inside, other=0.0)
        values = values * shrink[:, None]
        values = tl.dot(weight.to(v.dtype), v, values, input_precision="ieee")
        largest = new_largest
    return values, largest, total
