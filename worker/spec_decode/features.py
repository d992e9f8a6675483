"""The seam for proposers that read the model's own hidden states, and where those come from.

A tap on the model keeps the hidden states of its last step; who guesses from them is told, request
by request, which of them belong to confirmed tokens.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from worker.runner.request_state import Int64Array


@runtime_checkable
class FeatureReader(Protocol):
    """A proposer that guesses from hidden states."""

    def see(
        self, request_id: str, features: torch.Tensor, *, position: int, next_tokens: Int64Array
    ) -> None:
        """Take in the hidden states [tokens, hidden_size] of consecutive confirmed tokens.

        They stand from `position` on; `next_tokens` [tokens] are what follows each of them.
        """
        ...


class HiddenTap:
    """Keeps the hidden states [tokens, hidden_size] of the last step of one model."""

    def __init__(self) -> None:
        self._hidden: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def take(self) -> torch.Tensor:
        """Return them, once."""
        assert self._hidden is not None, "the model has computed nothing since"
        hidden, self._hidden = self._hidden, None
        return hidden
