"""What spreads channels over their neighbours."""

from __future__ import annotations

import torch

from worker.cpu.hadamard import HADAMARD_SIZE, hadamard


def test_products_of_two_vectors_stay() -> None:
    a, b = torch.randn(2, 5, 3 * HADAMARD_SIZE, generator=torch.Generator().manual_seed(0))
    products = (hadamard(a) * hadamard(b)).sum(-1) / HADAMARD_SIZE
    torch.testing.assert_close(products, (a * b).sum(-1), rtol=1e-5, atol=1e-4)


def test_one_loud_channel_is_spread_over_its_neighbours_alone() -> None:
    x = torch.zeros(2 * HADAMARD_SIZE)
    x[HADAMARD_SIZE + 3] = 7.0
    spread = hadamard(x).abs()
    assert spread[:HADAMARD_SIZE].count_nonzero() == 0
    assert torch.equal(spread[HADAMARD_SIZE:], torch.full((HADAMARD_SIZE,), 7.0))
