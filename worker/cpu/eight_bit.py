"""A weight matrix that stays in eight bits, as plain torch operations see it.

What computes with it in compiled code reads the same numbers. It knows no checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class EightBitWeight:
    """Numbers in eight bits and what they are multiplied by.

    `scales` is [ceil(out / rows), ceil(in / columns)] for `block` = (rows, columns).
    """

    values: torch.Tensor  # [out, in] int8, float8_e4m3fn or float8_e5m2
    scales: torch.Tensor  # float32
    block: tuple[int, int]

    @property
    def is_per_row(self) -> bool:
        """Whether there is one scale for each row."""
        return self.scales.shape == (len(self.values), 1)

    def float(self) -> torch.Tensor:
        """Return what it stands for, [out, in] float32: each product is rounded once."""
        (out_size, in_size), (rows, columns) = self.values.shape, self.block
        scales = self.scales
        if rows > 1:
            scales = scales.repeat_interleave(rows, dim=0)[:out_size]
        if columns < in_size:
            scales = scales.repeat_interleave(columns, dim=1)[:, :in_size]
        return self.values.float() * scales

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> EightBitWeight:
        """Return some rows of a weight with a scale per row."""
        return EightBitWeight(self.values[rows], self.scales[rows], self.block)


def joined(parts: list[EightBitWeight]) -> EightBitWeight:
    """Put weights of equal width and kind, with a scale per row, below each other."""
    return EightBitWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        parts[0].block,
    )
