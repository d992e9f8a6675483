"""Attention of requests with equally few queries each, their contexts split among programs.

One program per request would read a long context alone while the rest of the device idles, so a
context is cut into `num_splits` parts whose softmaxes are merged (flash decoding, Dao et al. 2023).
The grid depends on the number of requests alone: lengths are read on the device.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from worker.kernels.jit import ceil_div, kernel, next_power_of_2
from worker.kernels.softmax import attend, check_paged, tile_shape

MAX_SPLITS = 32
_SPLIT_TOKENS = 256
"""A part shorter than this costs more to merge than it saves."""


def choose_num_splits(
    *, num_requests: int, num_kv_heads: int, max_context: int, num_processors: int
) -> int:
    """Return a power of two of parts, so that about two programs run per multiprocessor.

    It must not depend on the lengths of a step: it is a constant of a captured graph.
    """
    wanted = ceil_div(2 * num_processors, num_requests * num_kv_heads)
    useful = ceil_div(max_context, _SPLIT_TOKENS)
    return 1 << (min(wanted, useful, MAX_SPLITS).bit_length() - 1)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_splits: int,
    out: torch.Tensor,
) -> None:
    """Attend every request's queries, its last tokens, to its whole context.

    query [requests * queries, heads, head_dim], rows contiguous, those of a request together;
    caches [blocks, block_size, kv_heads, head_dim], contiguous; block_tables [requests, blocks]
    int32; context_lens [requests] int32, 0 for padding, whose rows become zero; out like query,
    contiguous.
    """
    num_rows, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_requests = len(context_lens)
    check_paged(query, key_cache, value_cache, block_tables=block_tables, out=out)
    assert num_rows % num_requests == 0
    group, num_queries = num_heads // num_kv_heads, num_rows // num_requests
    tile, padded_dim = tile_shape(key_cache)
    sums, scores = out, out
    if num_splits > 1:
        sums = out.new_empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32)
        scores = out.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    _decode[(num_requests, num_kv_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        sums,
        scores,
        query.stride(0),
        block_tables.stride(0),
        math.log2(math.e) / math.sqrt(head_dim),
        NUM_SPLITS=num_splits,
        NUM_QUERIES=num_queries,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        M=max(16, next_power_of_2(group * num_queries)),
        N=tile,
        D=padded_dim,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        _merge[(num_rows, num_heads)](
            sums,
            scores,
            context_lens,
            out,
            NUM_SPLITS=num_splits,
            NUM_QUERIES=num_queries,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            N=tile,
            D=padded_dim,
            num_warps=max(1, num_splits * padded_dim // 1024),
        )


@kernel()
def _split_tokens(context: tl.tensor, NUM_SPLITS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the length of a part: whole tiles, so that only the last part is ragged."""
    return tl.cdiv(tl.cdiv(context, NUM_SPLITS), N) * N


@kernel()
def _decode(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    sums: tl.tensor,
    scores: tl.tensor,
    query_stride: int,
    table_stride: int,
    scale: float,
    NUM_SPLITS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + request)
    length = _split_tokens(context, NUM_SPLITS, N)
    start = split * length
    if (start < context) | (NUM_SPLITS == 1):
        row = tl.arange(0, M)
        column = tl.arange(0, D)
        valid = row < NUM_QUERIES * GROUP
        inside = valid[:, None] & (column < HEAD_DIM)[None, :]
        token = request * NUM_QUERIES + row // GROUP
        head = kv_head * GROUP + row % GROUP
        offset = (token * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
        q = tl.load(query + offset, mask=inside, other=0.0)
        values, largest, total = attend(
            q,
            context - NUM_QUERIES + row // GROUP,
            key_cache,
            value_cache,
            block_tables + request * table_stride,
            kv_head,
            start,
            tl.minimum(context, start + length),
            scale,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            M,
            N,
            D,
        )
        # Nothing was seen: by padding, or by an early query of a part that begins after it.
        result = values / tl.where(total > 0, total, 1.0)[:, None]
        at = (token * (NUM_KV_HEADS * GROUP) + head) * NUM_SPLITS + split
        target = sums + (at * HEAD_DIM)[:, None] + column[None, :]
        tl.store(target, result.to(sums.dtype.element_ty), mask=inside)
        if NUM_SPLITS > 1:
            tl.store(scores + at, largest + tl.log2(total), mask=valid)


@kernel()
def _merge(
    sums: tl.tensor,
    scores: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = token * NUM_HEADS + tl.program_id(1)
    context = tl.load(context_lens + token // NUM_QUERIES)
    split = tl.arange(0, NUM_SPLITS)
    column = tl.arange(0, D)
    written = split * _split_tokens(context, NUM_SPLITS, N) < context
    score = tl.load(scores + at * NUM_SPLITS + split, mask=written, other=float("-inf"))
    largest = tl.max(score, axis=0)
    weight = tl.exp2(score - tl.where(largest == float("-inf"), 0.0, largest))
    inside = written[:, None] & (column < HEAD_DIM)[None, :]
    source = sums + (at * NUM_SPLITS + split)[:, None] * HEAD_DIM + column[None, :]
    values = tl.sum(tl.load(source, mask=inside, other=0.0) * weight[:, None], axis=0)
    total = tl.sum(weight, axis=0)
    result = values / tl.where(total > 0, total, 1.0)
    tl.store(out + at * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)
