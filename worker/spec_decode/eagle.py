"""An EAGLE head: one decoder layer that continues the model's hidden states (Li et al. 2024).

It reads each token together with the hidden state before it, guesses the next hidden state and from
that the next token, and goes on with its own guesses. No tree of alternatives. Tokens whose hidden
states the model took from the prefix cache are unknown to it. No checkpoint is read; a random head
shows that outputs do not depend on what is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.spec_decode.proposer import DraftContext
from worker.model.rotary import apply_rotary
from worker.runner.request_state import Int64Array


@dataclass(slots=True, frozen=True)
class EagleHead:
    """Weights of the head; `rotary` [2, positions, head_dim / 2] is the model's."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    join: torch.Tensor  # [hidden_size, 2 * hidden_size]
    qkv: torch.Tensor  # [3 * hidden_size, hidden_size]
    out: torch.Tensor  # [hidden_size, hidden_size]
    gate_up: torch.Tensor  # [4 * hidden_size, hidden_size]
    down: torch.Tensor  # [hidden_size, 2 * hidden_size]
    head: torch.Tensor  # [vocab_size, hidden_size]
    rotary: torch.Tensor
    head_dim: int

    @classmethod
    def random(
        cls, *, hidden_size: int, vocab_size: int, head_dim: int, rotary: torch.Tensor, seed: int
    ) -> EagleHead:
        """Draw weights; the attention has as many heads of `head_dim` as fit the hidden size."""
        generator = torch.Generator().manual_seed(seed)
        width = hidden_size // head_dim * head_dim

        def draw(*shape: int) -> torch.Tensor:
            weights: torch.Tensor = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return weights

        return cls(
            embedding=draw(vocab_size, hidden_size),
            join=draw(hidden_size, 2 * hidden_size),
            qkv=draw(3 * width, hidden_size),
            out=draw(hidden_size, width),
            gate_up=draw(4 * hidden_size, hidden_size),
            down=draw(hidden_size, 2 * hidden_size),
            head=draw(vocab_size, hidden_size),
            rotary=rotary,
            head_dim=head_dim,
        )


@dataclass(slots=True)
class _Seen:
    """What the head knows of a request: keys and values [heads, tokens, head_dim], and where it is.

    `feature` [hidden_size] is its guess of the newest token's hidden state.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position: int
    feature: torch.Tensor


class EagleProposer:
    """Guesses for each request by the head, which follows the confirmed tokens."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._seen: dict[str, _Seen] = {}

    def see(
        self, request_id: str, features: torch.Tensor, *, position: int, next_tokens: Int64Array
    ) -> None:
        """Take in confirmed tokens with the hidden states before them; see FeatureReader."""
        before = self._seen.get(request_id)
        self._seen[request_id] = self._go_on(
            before, features.float(), torch.from_numpy(next_tokens), position
        )

    def propose(self, contexts: Sequence[DraftContext]) -> dict[str, list[int]]:
        """Return the head's own continuation of each request; see Proposer."""
        return {
            context.request_id: self._continue(self._seen[context.request_id], context.max_drafts)
            for context in contexts
            if context.request_id in self._seen
        }

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request; unknown ids are ignored."""
        self._seen.pop(request_id, None)

    def _continue(self, seen: _Seen, count: int) -> list[int]:
        drafts: list[int] = []
        while True:
            drafts.append(int((self._head.head @ seen.feature).argmax()))
            if len(drafts) == count:
                return drafts
            token = torch.tensor(drafts[-1:])
            seen = self._go_on(seen, seen.feature[None], token, seen.position)

    def _go_on(
        self, before: _Seen | None, features: torch.Tensor, tokens: torch.Tensor, position: int
    ) -> _Seen:
        """Run the layer over consecutive tokens from `position` on, behind what it has seen."""
        head = self._head
        joined = torch.cat((F.embedding(tokens, head.embedding), features), dim=-1)
        hidden = joined @ head.join.T
        normed = _normed(hidden)
        shape = (3, len(tokens), -1, head.head_dim)
        query, key, value = (
            (normed @ head.qkv.T).view(len(tokens), 3, -1).transpose(0, 1).view(shape)
        )
        places = torch.arange(position, position + len(tokens)) % head.rotary.shape[1]
        cos, sin = head.rotary[:, places, None, :]
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        if before is not None:
            keys = torch.cat((before.keys, keys), dim=1)
            values = torch.cat((before.values, values), dim=1)
        num_before = keys.shape[1] - len(tokens)
        mask = torch.ones(len(tokens), keys.shape[1], dtype=torch.bool).tril(num_before)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask
        )
        hidden = hidden + attended[0].transpose(0, 1).flatten(1) @ head.out.T
        gate, up = (_normed(hidden) @ head.gate_up.T).chunk(2, dim=-1)
        hidden = hidden + (F.silu(gate) * up) @ head.down.T
        return _Seen(keys, values, position + len(tokens), hidden[-1])


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])
