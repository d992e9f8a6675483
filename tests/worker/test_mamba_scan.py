"""The recurrence of Mamba-2: by products of matrices it is what it is token by token."""

from __future__ import annotations

import pytest
import torch

from worker.model.mamba_scan import ScanInputs, advance, scan

HEADS, HEAD_DIM, STATE_SIZE = 6, 5, 8


def inputs_of(num_tokens: int, *, groups: int, seed: int = 0) -> ScanInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    return ScanInputs(
        values=normal(HEADS, HEAD_DIM),
        steps=normal(HEADS).exp(),
        writes=normal(groups, STATE_SIZE),
        reads=normal(groups, STATE_SIZE),
    )


def by_hand(
    inputs: ScanInputs, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the recurrence out in float64, head by head."""
    per_group = HEADS // inputs.writes.shape[1]
    outputs, states = [], state.double()
    for token in range(len(inputs.values)):
        heads = []
        for head in range(HEADS):
            step = inputs.steps[token, head].double()
            write, read = (
                vectors[token, head // per_group].double()
                for vectors in (inputs.writes, inputs.reads)
            )
            fading = (step * decay[head].double()).exp()
            value = inputs.values[token, head].double()
            states[head] = fading * states[head] + step * torch.outer(value, write)
            heads.append(states[head] @ read)
        outputs.append(torch.stack(heads))
    return torch.stack(outputs), states


def random_state() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(HEADS, HEAD_DIM, STATE_SIZE, generator=generator)


DECAY = -torch.linspace(0.05, 4.0, HEADS)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_a_stretch_is_the_recurrence_token_by_token(groups: int, num_tokens: int) -> None:
    inputs, state = inputs_of(num_tokens, groups=groups), random_state()
    expected, expected_state = by_hand(inputs, DECAY, state)
    outputs = scan(inputs, DECAY, state)
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 3])
def test_requests_that_advance_together_do_not_touch_each_other(groups: int) -> None:
    inputs = inputs_of(4, groups=groups)
    states = torch.stack([random_state() * factor for factor in (0.0, 1.0, 2.0, 3.0)])
    alone = [by_hand(inputs.part(i, i + 1), DECAY, states[i].clone()) for i in range(4)]
    outputs = advance(inputs, DECAY, states)
    for i, (expected, expected_state) in enumerate(alone):
        torch.testing.assert_close(outputs[i].double(), expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[i].double(), expected_state, rtol=1e-4, atol=1e-4)


def test_a_text_may_be_cut_anywhere() -> None:
    inputs, whole, cut = inputs_of(20, groups=2), random_state(), random_state()
    expected = scan(inputs, DECAY, whole)
    parts = [scan(inputs.part(*each), DECAY, cut) for each in ((0, 7), (7, 8), (8, 20))]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)


def test_short_steps_behind_very_long_ones_keep_their_weight() -> None:
    """Sums of exponents reach tens of thousands there, where float32 knows no thousandths."""
    inputs = inputs_of(64, groups=1)
    inputs.steps[:32] = 800.0
    inputs.steps[32:] = 0.01
    expected, _ = by_hand(inputs, DECAY, random_state())
    outputs = scan(inputs, DECAY, random_state())
    torch.testing.assert_close(outputs[33:].double(), expected[33:], rtol=1e-5, atol=1e-4)
