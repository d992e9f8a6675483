"""Spreads what a few channels hold over their neighbours, so that rounding harms them less."""

from __future__ import annotations

from functools import cache

import torch

HADAMARD_SIZE = 32
"""So many neighbouring channels are transformed together."""


@cache
def _matrix() -> torch.Tensor:
    matrix, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < HADAMARD_SIZE:
        matrix = torch.kron(pair, matrix)
    return matrix


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return the Walsh-Hadamard transform (Sylvester) of each HADAMARD_SIZE channels of the last.

    Computed in float32, rounded to x's precision. Products of two transformed vectors are
    HADAMARD_SIZE times as large as before.
    """
    groups = x.float().reshape(-1, HADAMARD_SIZE)
    return (groups @ _matrix()).view(x.shape).to(x.dtype)
