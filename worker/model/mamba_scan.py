"""The state-space recurrence of Mamba-2: a stretch of tokens at once, or one of many requests each.

A head's state fades by exp(step * decay) per token and takes in step * value * write; a token's
output is what its state holds in the direction of `read`. A stretch is computed by products of
matrices (SSD, Dao and Gu 2024), a single token as it is written here. Everything is float32. It
knows neither requests nor where states are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class ScanInputs:
    """What tokens bring to the recurrence; heads follow each other by groups."""

    values: torch.Tensor  # [tokens, heads, head_dim]
    steps: torch.Tensor  # [tokens, heads] > 0
    writes: torch.Tensor  # [tokens, groups, state_size]
    reads: torch.Tensor  # [tokens, groups, state_size]

    def part(self, start: int, end: int) -> ScanInputs:
        """Return tokens [start, end)."""
        return ScanInputs(
            self.values[start:end],
            self.steps[start:end],
            self.writes[start:end],
            self.reads[start:end],
        )

    def rows(self, rows: torch.Tensor) -> ScanInputs:
        """Return the tokens in `rows`."""
        return ScanInputs(self.values[rows], self.steps[rows], self.writes[rows], self.reads[rows])


def advance(inputs: ScanInputs, decay: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Take one token into each of several states; return the outputs [tokens, heads, head_dim].

    decay [heads] < 0; states [tokens, heads, head_dim, state_size] are updated in place.
    """
    num_tokens, num_groups, state_size = inputs.writes.shape
    entering = inputs.values * inputs.steps[:, :, None]
    states *= (inputs.steps * decay).exp()[:, :, None, None]
    by_group = states.view(num_tokens, num_groups, -1, state_size)
    by_group.addcmul_(entering.reshape(num_tokens, num_groups, -1, 1), inputs.writes[:, :, None, :])
    held = by_group @ inputs.reads[:, :, :, None]
    return held.view(inputs.values.shape)


def scan(inputs: ScanInputs, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Take consecutive tokens into a state; return the outputs [tokens, heads, head_dim].

    decay [heads] < 0; state [heads, head_dim, state_size] is updated in place. Work and memory grow
    with the square of the tokens, so a long text is better cut.
    NOTE: exponents are differences of sums, and one token may add as much as hundreds to a sum;
    they are float64 until they are small.
    """
    num_tokens, num_heads, head_dim = inputs.values.shape
    _, num_groups, state_size = inputs.writes.shape
    reads, writes = inputs.reads.transpose(0, 1), inputs.writes.transpose(0, 1)
    exponents = (inputs.steps.double() * decay.double()).cumsum(dim=0).t()  # [heads, tokens]
    entering = inputs.values * inputs.steps[:, :, None]

    within = _fading(exponents).view(num_groups, -1, num_tokens, num_tokens)
    scores = within * (reads @ writes.transpose(1, 2))[:, None]
    own = scores.view(num_heads, num_tokens, num_tokens) @ entering.transpose(0, 1)

    carried = reads @ state.view(num_groups, -1, state_size).transpose(1, 2)
    carried = carried.view(num_groups, num_tokens, -1, head_dim).transpose(1, 2)
    since_start = exponents.exp().float()
    outputs = own + carried.reshape(own.shape) * since_start[:, :, None]

    until_end = (exponents[:, -1:] - exponents).exp().float()
    remaining = (entering * until_end.t()[:, :, None]).reshape(num_tokens, num_groups, -1)
    state *= since_start[:, -1, None, None]
    state.view(num_groups, -1, state_size).baddbmm_(remaining.permute(1, 2, 0), writes)
    return outputs.transpose(0, 1)


def _fading(exponents: torch.Tensor) -> torch.Tensor:
    """Return what is left at each token of each one before it, [heads, tokens, tokens]."""
    num_tokens = exponents.shape[1]
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    between = (exponents[:, :, None] - exponents[:, None, :]).float()
    return between.masked_fill_(later, -torch.inf).exp_()
