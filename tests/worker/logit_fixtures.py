"""All logits of a prompt, by any of our models, over scattered blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.cpu.attention import AttentionPlan, Int32Array
from worker.model.causal_lm import CausalLM
from worker.model.kv_layout import attention_block_size, kv_layout
from worker.model.llama import KVCache
from worker.model.lora import NO_ADAPTERS, BatchAdapters

BLOCK_SIZE = 16
NUM_POSITIONS = 512
"""As many as a model must be loaded for; prompts are shorter."""

_NUM_BLOCKS = 256
_BLOCKS_PER_GROUP = 10


def logits_of(
    model: CausalLM,
    token_ids: Sequence[int],
    sizes: Sequence[int],
    *,
    adapters: BatchAdapters = NO_ADAPTERS,
) -> torch.Tensor:
    """Compute a prompt of up to 160 tokens chunk by chunk; what nobody wrote is NaN."""
    config = model.config
    layout = kv_layout(config.num_layers, config.windows)
    of_attention = attention_block_size(
        config, block_size=BLOCK_SIZE, itemsize=model.dtype.itemsize
    )
    tokens = of_attention or BLOCK_SIZE
    shape = (layout.num_rows, _NUM_BLOCKS, tokens, config.num_kv_heads, config.head_dim)
    cache = KVCache(*(torch.full(shape, torch.nan, dtype=model.dtype) for _ in range(2)))
    cache.keys[:, 0] = cache.values[:, 0] = 0.0  # the null block
    blocks = np.random.default_rng(1).permutation(np.arange(1, _NUM_BLOCKS, dtype=np.int32))
    num_groups = len(layout.windows)
    first, *more = np.split(blocks[: _BLOCKS_PER_GROUP * num_groups][None], num_groups, axis=1)
    return logits_in(model, cache, token_ids, sizes, tables=(first, *more), adapters=adapters)


def logits_in(
    model: CausalLM,
    cache: KVCache,
    token_ids: Sequence[int],
    sizes: Sequence[int],
    *,
    tables: Sequence[Int32Array],
    adapters: BatchAdapters = NO_ADAPTERS,
) -> torch.Tensor:
    """Compute all logits of a prompt, chunk by chunk; `tables` are those of the cache groups."""
    logits, start = [], 0
    first, *more = tables
    for size in sizes:
        plan = AttentionPlan(np.array([size]), np.array([start]), first, BLOCK_SIZE, tuple(more))
        logits.append(
            model.forward(
                torch.tensor(token_ids[start : start + size]),
                torch.arange(start, start + size),
                cache=cache,
                plan=plan,
                rows=torch.arange(size),
                adapters=adapters,
            )
        )
        start += size
    return torch.cat(logits)
