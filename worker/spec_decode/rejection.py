"""Rejection sampling: takes a guess with the right probability, else draws from what is left.

For guesses drawn from a known distribution q, in place of a draw from p: the token has distribution
p exactly, and equals the guess as often as any method can make it (Leviathan, Kalman, Matias 2023;
Chen et al. 2023). It knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from worker.runner.adjust import adjust
from worker.runner.sampler import draw, tempered, uniform
from worker.runner.sampling_state import SamplingRows

_ACCEPT = np.uint64(0xA0761D6478BD642F)
_DRAW = np.uint64(0xE7037ED1A0B428DB)
"""Set the numbers of a verification apart from each other, and from those of guesses."""


class Guess(NamedTuple):
    """A token guessed for a row, and the distribution [vocab_size] that it was drawn from."""

    row: int
    token_id: int
    proposal: torch.Tensor


def verified(
    logits: torch.Tensor, rows: SamplingRows, guesses: Sequence[Guess]
) -> list[tuple[int, int]]:
    """Return (row, token) for each guess: a token of the distribution that its row asks for.

    logits [rows, vocab_size] float32, with what a grammar excludes at -inf.
    """
    if not guesses:
        return []
    which = np.array([guess.row for guess in guesses], np.int64)
    index = torch.from_numpy(which).to(logits.device)
    target = tempered(adjust(logits, rows)[index], rows, which).softmax(dim=-1)
    seed, choice, position = rows.seed[which], rows.choice[which], rows.position[which]
    tokens = rejection_sample(
        target,
        torch.stack([guess.proposal for guess in guesses]).to(logits.device),
        torch.tensor([guess.token_id for guess in guesses], device=logits.device),
        accept_at=torch.from_numpy(uniform(seed ^ _ACCEPT, choice, position)).to(logits.device),
        draw_at=torch.from_numpy(uniform(seed ^ _DRAW, choice, position)).to(logits.device),
    )
    return list(zip(which.tolist(), tokens.tolist(), strict=True))


def rejection_sample(
    target: torch.Tensor,
    proposal: torch.Tensor,
    drafts: torch.Tensor,
    *,
    accept_at: torch.Tensor,
    draw_at: torch.Tensor,
) -> torch.Tensor:
    """Return one token per row, distributed as `target` when the draft is drawn from `proposal`.

    target, proposal [rows, vocab_size]: probabilities p and q; drafts [rows] int64; accept_at,
    draw_at [rows]: independent uniform numbers in [0, 1). A draft x is taken with probability
    min(1, p(x) / q(x)), else the token is drawn from max(0, p - q), normalised.
    """
    p = target.double().gather(1, drafts[:, None]).squeeze(1)
    q = proposal.double().gather(1, drafts[:, None]).squeeze(1)
    accepted = accept_at.double() * q < p
    left = (target.double() - proposal.double()).clamp(min=0.0)
    # Nothing is left where p equals q; there, every draft is accepted but for rounding.
    left = torch.where(left.sum(dim=1, keepdim=True) > 0, left, target.double())
    return torch.where(accepted, drafts, draw(left, draw_at.double()))
