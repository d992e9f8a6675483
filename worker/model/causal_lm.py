"""What a runner needs of a model, whichever file computes it, and the cache that both share."""

from __future__ import annotations

from typing import Protocol

import torch

from worker.cpu.attention import AttentionPlan
from worker.model.config import ModelConfig
from worker.model.llama import KVCache
from worker.model.lora import NO_ADAPTERS, BatchAdapters


class CausalLM(Protocol):
    """A decoder with loaded weights, or a rank's part of one; immutable.

    `config` is the shape of what this process computes: of several ranks, each has its own heads.
    """

    @property
    def config(self) -> ModelConfig:
        """The shape of the model as this process computes it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of weights and activations."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: KVCache,
        plan: AttentionPlan,
        rows: torch.Tensor,
        adapters: BatchAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Compute a flattened batch; write its KV; return float32 logits of `rows` alone.

        token_ids, positions [tokens] int64; rows [sampled] int64; result [sampled, vocab_size].
        `adapters` say which tokens run with which LoRA adapter.
        """
        ...
