"""Writes the keys and values of a step into their slots of a paged cache.

A slot is `block_id * block_size + offset`. Slots of the null block 0 mean "nowhere": that is how
padding rows write nothing.
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker.kernels.jit import check_contiguous, check_launchable, kernel, next_power_of_2


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store key, value [tokens, kv_heads, head_dim] at slots [tokens], of any integer type.

    The caches are contiguous [blocks, block_size, kv_heads, head_dim]; rows of key and value may
    lie apart (views of a fused projection), but each row is contiguous.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1), "a row is not contiguous"
    check_contiguous(key_cache, value_cache)
    check_launchable(key, key_cache, slots)
    width = num_kv_heads * head_dim
    _store_kv[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key.stride(0),
        value.stride(0),
        BLOCK_SIZE=key_cache.shape[1],
        WIDTH=width,
        COLUMNS=next_power_of_2(width),
    )


@kernel()
def _store_kv(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_stride: int,
    value_stride: int,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= BLOCK_SIZE:
        column = tl.arange(0, COLUMNS)
        inside = column < WIDTH
        k = tl.load(key + token * key_stride + column, mask=inside)
        v = tl.load(value + token * value_stride + column, mask=inside)
        tl.store(key_cache + slot * WIDTH + column, k, mask=inside)
        tl.store(value_cache + slot * WIDTH + column, v, mask=inside)
