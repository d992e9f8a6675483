"""Causal attention over a paged KV cache, in plain torch operations.

Queries of one request are a chunk; requests with a single query are grouped by context length.
Arithmetic is float32 whatever the cache holds. It knows block tables, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_GROUP_TOKENS = 16_384
"""Context tokens (padding included) gathered at a time for a group of decode rows."""


@dataclass(slots=True, frozen=True)
class Chunk:
    """Consecutive queries of one request: rows [start, end) of the batch."""

    start: int
    end: int
    slots: torch.Tensor  # [context] int64
    mask: torch.Tensor  # [end - start, context] bool, True = may look


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Requests with one query each and contexts of similar length.

    What lies beyond a context reads slot 0: it belongs to the null block, which nobody writes, so
    it is zero. Any other slot may hold a NaN, and a masked NaN still poisons the sum.
    """

    rows: torch.Tensor  # [requests] int64, rows of the batch
    slots: torch.Tensor  # [requests, context] int64, padded with 0
    mask: torch.Tensor  # [requests, 1, 1, context] bool, True = may look


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """Which rows of a batch belong to which request, and where its context lies.

    Rows of a request are its tokens from `num_computed` on; requests follow each other.
    """

    num_queries: Int64Array  # [requests] >= 1
    num_computed: Int64Array  # [requests] tokens of context before the first query
    block_tables: Int32Array  # [requests, blocks] covering every query
    block_size: int
    more_tables: tuple[Int32Array, ...] = ()  # of the cache groups behind the first

    def tables(self, group: int) -> Int32Array:
        """Return the block tables of one cache group."""
        return self.more_tables[group - 1] if group else self.block_tables

    def slots(self, positions: Int64Array, *, group: int = 0) -> Int64Array:
        """Return where the tokens of the batch, at `positions` [tokens], are written.

        A slot is `block_id * block_size + offset`.
        """
        request = np.repeat(np.arange(len(self.num_queries)), self.num_queries)
        blocks = self.tables(group)[request, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size


@dataclass(slots=True, frozen=True)
class PlainPlan:
    """The same for plain torch operations: where tokens write, and what queries gather."""

    slots: torch.Tensor  # [tokens] int64
    chunks: Sequence[Chunk]
    groups: Sequence[DecodeGroup]


def plain_plan(plan: AttentionPlan, *, group: int = 0, window: int | None = None) -> PlainPlan:
    """Lay out gathers: a chunk for each request with several queries, groups for the others.

    For the layers of one cache group, whose tokens read the last `window` tokens, all if None.
    """
    tables = plan.tables(group)
    ends = np.cumsum(plan.num_queries)
    starts = ends - plan.num_queries
    single = np.flatnonzero(plan.num_queries == 1)
    positions = np.arange(ends[-1]) + np.repeat(plan.num_computed - starts, plan.num_queries)
    return PlainPlan(
        slots=torch.from_numpy(plan.slots(positions, group=group)),
        chunks=[
            chunk_of(
                start=int(starts[i]),
                end=int(ends[i]),
                num_computed=int(plan.num_computed[i]),
                block_ids=tables[i],
                block_size=plan.block_size,
                window=window,
            )
            for i in np.flatnonzero(plan.num_queries > 1)
        ],
        groups=decode_groups(
            rows=starts[single],
            num_context=plan.num_computed[single] + 1,
            block_tables=tables[single],
            block_size=plan.block_size,
            window=window,
        ),
    )


def plain_plans(plan: AttentionPlan, windows: Sequence[int | None]) -> list[PlainPlan]:
    """Lay out the gathers of every cache group, given the window of each."""
    return [plain_plan(plan, group=i, window=window) for i, window in enumerate(windows)]


def chunk_of(
    *,
    start: int,
    end: int,
    num_computed: int,
    block_ids: Int32Array,
    block_size: int,
    window: int | None = None,
) -> Chunk:
    """Plan the queries of a request that follow `num_computed` tokens of context.

    Blocks before every query's window are not touched: they may belong to others by now.
    """
    num_queries = end - start
    first = 0 if window is None else max(0, num_computed - window + 1)
    positions = np.arange(first, num_computed + num_queries)
    slots = slots_of(block_ids, positions, block_size)
    diagonal = num_computed - first
    mask = torch.ones(num_queries, len(positions), dtype=torch.bool).tril(diagonal)
    if window is not None:
        mask = mask.triu(diagonal - window + 1)
    return Chunk(start, end, torch.from_numpy(slots), mask)


def decode_groups(
    *,
    rows: Int64Array,
    num_context: Int64Array,
    block_tables: Int32Array,
    block_size: int,
    window: int | None = None,
) -> list[DecodeGroup]:
    """Group decode rows by context length, so that padding and memory stay bounded."""
    num_read = num_context if window is None else np.minimum(num_context, window)
    order = np.argsort(-num_read, kind="stable")
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(order):
        longest = int(num_read[order[first]])
        members = order[first : first + max(1, _GROUP_TOKENS // longest)]
        skipped = (num_context - num_read)[members, None]
        positions = np.minimum(skipped + np.arange(longest), num_context[members, None] - 1)
        inside = np.arange(longest) < num_read[members, None]
        blocks = np.take_along_axis(block_tables[members], positions // block_size, axis=1)
        slots = blocks.astype(np.int64) * block_size + positions % block_size
        slots = np.where(inside, slots, 0)
        mask = torch.from_numpy(inside)[:, None, None, :]
        groups.append(DecodeGroup(torch.from_numpy(rows[members]), torch.from_numpy(slots), mask))
        first += len(members)
    return groups


def slots_of(block_ids: Int32Array, positions: Int64Array, block_size: int) -> Int64Array:
    """Return the slots of positions under a block table [..., blocks], or under several."""
    blocks = block_ids[..., positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: PlainPlan
) -> torch.Tensor:
    """Attend every query to its own context; keys and values must already hold it.

    query [tokens, heads, head_dim]; keys, values [blocks, block_size, kv_heads, head_dim] of one
    layer; result [tokens, heads, head_dim] in the query's precision.
    """
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    result = torch.empty_like(query)
    for chunk in plan.chunks:
        result[chunk.start : chunk.end] = _attend_chunk(query, keys, values, chunk)
    for group in plan.groups:
        result[group.rows] = _attend_group(query, keys, values, group)
    return result


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk
) -> torch.Tensor:
    q = query[chunk.start : chunk.end].float().transpose(0, 1)
    k = keys.index_select(0, chunk.slots).float().transpose(0, 1)
    v = values.index_select(0, chunk.slots).float().transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=chunk.mask, enable_gqa=True
    )
    return out[0].transpose(0, 1).to(query.dtype)


def _attend_group(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    """Treat the query heads that share a KV head as the queries of that head."""
    num_requests, num_context = group.slots.shape
    _, num_kv_heads, head_dim = keys.shape
    shape = (num_requests, num_context, num_kv_heads, head_dim)
    slots = group.slots.flatten()
    k = keys.index_select(0, slots).float().view(shape).transpose(1, 2)
    v = values.index_select(0, slots).float().view(shape).transpose(1, 2)
    q = query[group.rows].float().view(num_requests, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
    return out.reshape(num_requests, -1, head_dim).to(query.dtype)
