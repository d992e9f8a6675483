"""Causal attention of chunks of any lengths over a paged KV cache, in one launch.

The grid depends on the number of tokens and requests alone, never on their lengths: each program
finds its request by bisection, and those beyond the last query end at once. So a launch can be
part of a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from worker.kernels.jit import kernel, next_power_of_2
from worker.kernels.softmax import attend, check_paged, tile_shape

_ROWS = 64
_ROWS_FLOAT32 = 16
"""Query rows of a program: tokens times the query heads that share a KV head. Products in float32
have no matrix instructions, and more rows than these do not fit the registers."""


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend the queries of each request to its context, which their own keys end.

    query [tokens, heads, head_dim], whose rows are contiguous; caches [blocks, block_size,
    kv_heads, head_dim], contiguous; block_tables [requests, blocks] int32; query_start
    [requests + 1] int32, not decreasing; context_lens [requests] int32, 0 for padding; out like
    query, contiguous. Rows beyond query_start[-1] stay as they are.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_requests = len(context_lens)
    check_paged(query, key_cache, value_cache, block_tables=block_tables, out=out)
    group = num_heads // num_kv_heads
    least = _ROWS_FLOAT32 if query.dtype == torch.float32 else _ROWS
    rows = max(least, next_power_of_2(group))
    tile, padded_dim = tile_shape(key_cache)
    _prefill[(num_tokens // (rows // group) + num_requests, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start,
        context_lens,
        out,
        query.stride(0),
        block_tables.stride(0),
        num_requests,
        math.log2(math.e) / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        M=rows,
        N=tile,
        D=padded_dim,
        num_warps=4 if padded_dim <= 128 else 8,
        num_stages=2,
    )


@kernel()
def _find_request(index: tl.tensor, query_start: tl.tensor, num_requests: int, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the request whose queries hold tile `index`.

    Request i owns the tiles from query_start[i] // Q + i on, so that none holds two requests.
    """
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // Q + middle <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel(varying=("num_requests",))
def _prefill(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    query_stride: int,
    table_stride: int,
    num_requests: int,
    scale: float,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
) -> None:
    Q: tl.constexpr = M // GROUP
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _find_request(index, query_start, num_requests, Q)
    start = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - start
    first = (index - (start // Q + request)) * Q
    if first < num_queries:
        row = tl.arange(0, M)
        column = tl.arange(0, D)
        token = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        valid = (row < Q * GROUP) & (token < num_queries)
        inside = valid[:, None] & (column < HEAD_DIM)[None, :]
        at = (start + token).to(tl.int64)
        offset = (at * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
        q = tl.load(query + offset, mask=inside, other=0.0)
        context = tl.load(context_lens + request)
        before = context - num_queries
        values, _, total = attend(
            q,
            before + token,
            key_cache,
            value_cache,
            block_tables + request.to(tl.int64) * table_stride,
            kv_head,
            0,
            tl.minimum(context, before + first + Q),
            scale,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            M,
            N,
            D,
        )
        result = values / total[:, None]
        offset = ((at * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + column[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
