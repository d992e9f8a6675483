"""Medusa heads: each guesses one place ahead from the same hidden state (Cai et al. 2024).

There is no tree of alternatives: every head gives its best token. No checkpoint is read; random
heads show that outputs do not depend on what is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.spec_decode.proposer import DraftContext
from worker.runner.request_state import Int64Array


@dataclass(slots=True, frozen=True)
class MedusaHeads:
    """Weights of all heads: a residual block, then a projection to the vocabulary."""

    block: torch.Tensor  # [heads, hidden_size, hidden_size]
    bias: torch.Tensor  # [heads, hidden_size]
    head: torch.Tensor  # [heads, vocab_size, hidden_size]

    @classmethod
    def random(cls, *, num_heads: int, hidden_size: int, vocab_size: int, seed: int) -> MedusaHeads:
        """Draw weights."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            weights: torch.Tensor = torch.randn(*shape, generator=generator) / hidden_size**0.5
            return weights

        return cls(
            draw(num_heads, hidden_size, hidden_size),
            draw(num_heads, hidden_size),
            draw(num_heads, vocab_size, hidden_size),
        )

    def guess(self, feature: torch.Tensor, count: int) -> list[int]:
        """Return the best token of the first `count` heads behind a hidden state."""
        mixed = torch.einsum("hij,j->hi", self.block[:count], feature) + self.bias[:count]
        states = feature + F.silu(mixed)
        best = torch.einsum("hvi,hi->hv", self.head[:count], states).argmax(dim=-1)
        tokens: list[int] = best.tolist()
        return tokens


class MedusaProposer:
    """Guesses behind the newest token of each request from the state that led to it."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._features: dict[str, torch.Tensor] = {}

    def see(
        self, request_id: str, features: torch.Tensor, *, position: int, next_tokens: Int64Array
    ) -> None:
        """Keep the last of the hidden states; see FeatureReader."""
        self._features[request_id] = features[-1].float()

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        """Return one guess per head, as many as are asked for; see Proposer."""
        return {
            context.request_id: self._heads.guess(
                self._features[context.request_id], context.max_drafts
            )
            for context in contexts
            if context.request_id in self._features
        }

    def forget(self, request_id: str) -> None:
        """Drop a request's hidden state; unknown ids are ignored."""
        self._features.pop(request_id, None)
