"""Inputs of the paged kernels: random caches whose unused part is poisoned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.kernels import reference


@dataclass(slots=True)
class PagedCase:
    """Requests with `queries` new tokens at the end of `contexts`, in scattered blocks.

    Whatever belongs to no context is NaN: a kernel that reads it cannot give a right result.
    """

    contexts: Sequence[int]
    queries: Sequence[int]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arguments of `reference.paged_attention`."""
        generator = torch.Generator().manual_seed(len(self.contexts) + sum(self.contexts))
        num_blocks = [-(-context // self.block_size) for context in self.contexts]
        order = torch.randperm(sum(num_blocks), generator=generator).to(torch.int32) + 1
        width = max(1, *num_blocks) + 2
        tables = torch.zeros(len(self.contexts), width, dtype=torch.int32)
        shape = (sum(num_blocks) + 1, self.block_size, self.num_kv_heads, self.head_dim)
        key, value = (torch.full(shape, math.nan, dtype=self.dtype) for _ in range(2))
        taken = 0
        for i, (count, context) in enumerate(zip(num_blocks, self.contexts, strict=True)):
            tables[i, :count] = order[taken : taken + count]
            taken += count
            for position in range(context):
                at = int(tables[i, position // self.block_size]), position % self.block_size
                for cache in (key, value):
                    row = torch.randn(self.num_kv_heads, self.head_dim, generator=generator)
                    cache[at] = row.to(self.dtype)
        num_tokens = sum(self.queries)
        fused = torch.randn(num_tokens, self.num_heads + 3, self.head_dim, generator=generator)
        query = fused.to(self.dtype)[:, : self.num_heads]
        start = torch.tensor([0, *torch.tensor(self.queries).cumsum(0)], dtype=torch.int32)
        return {
            "query": query,
            "key_cache": key,
            "value_cache": value,
            "block_tables": tables,
            "query_start": start,
            "context_lens": torch.tensor(self.contexts, dtype=torch.int32),
            "out": torch.zeros(num_tokens, self.num_heads, self.head_dim, dtype=self.dtype),
        }

    def expected(self) -> torch.Tensor:
        """Return what the reference computes."""
        tensors = self.tensors()
        reference.paged_attention(**tensors)
        return tensors["out"]
