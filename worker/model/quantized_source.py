"""Tensors of a folder whose weights are stored in eight bits, with their scales.

It knows how they are stored and what they stand for, not what is computed with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kvindex.foundation.errors import DependencyError
from worker.cpu.eight_bit import EightBitWeight
from worker.model.config import ModelConfig
from worker.model.quantization import UNUSED, Quantization
from worker.model.weights import WeightSource

_EIGHT_BITS = ("I8", "F8_E4M3", "F8_E5M2")
_NOT_A_NUMBER = 0x7F
"""Of float8_e4m3fn, but for the sign."""


def open_weights(folder: Path, config: ModelConfig) -> WeightSource:
    """Return the tensors of a folder; DependencyError when there are none."""
    if config.quantization is None:
        return WeightSource(folder)
    return QuantizedSource(folder, config.quantization)


class QuantizedSource(WeightSource):
    """The same for a quantized folder: `take` hands out what a weight stands for, in float32."""

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        super().__init__(folder)
        self._quantization = quantization

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor, whose shape must be `shape`."""
        weight = self.take_eight_bits(name, shape)
        return super().take(name, shape) if weight is None else weight.float()

    def take_eight_bits(self, name: str, shape: tuple[int, ...]) -> EightBitWeight | None:
        """Return a weight as it is stored; None when that is not in eight bits."""
        if f"{name}_packed" in self:
            values = self._unpacked(name, shape)
        elif self.stored_dtype(name) in _EIGHT_BITS:
            values = self._shaped(name, shape)
        else:
            return None
        if _holds_nan(values):
            raise DependencyError(f"{self.folder}: tensor {name} holds numbers that are none")
        scales, block = self._scales(name, shape)
        return EightBitWeight(values, scales, block)

    def dtypes(self) -> set[str]:
        """Return the precisions of what is not quantized."""
        kept = {
            self.stored_dtype(name) or ""
            for name in self._entries
            if name.endswith((".weight", ".bias"))
        }
        return kept.difference(_EIGHT_BITS)

    def untaken(self) -> Iterator[str]:
        """Yield the names that nobody asked for and that would have made a difference."""
        return (name for name in super().untaken() if name.rpartition(".")[2] not in UNUSED)

    def _unpacked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read four numbers from each 32-bit integer, lowest byte first, counted from -128."""
        out_size, in_size = shape
        packed = self._shaped(f"{name}_packed", (out_size, -(-in_size // 4)))
        stored_shape = self._shaped(f"{name}_shape", (len(shape),)).tolist()
        if packed.dtype != torch.int32 or stored_shape != list(shape):
            raise DependencyError(
                f"{self.folder}: tensor {name}_packed is {packed.dtype} of {stored_shape}, "
                f"config.json asks for eight-bit numbers of {list(shape)} in torch.int32"
            )
        return (packed.view(torch.uint8)[:, :in_size] ^ 0x80).view(torch.int8)

    def _scales(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the scales of a weight, and the rows and columns that one is for."""
        out_size, in_size = shape
        stem = name.removesuffix("weight")
        names = [stem + each for each in self._quantization.scales]
        present = [each for each in names if each in self]
        if not present:
            raise DependencyError(
                f"{self.folder}: tensor {name} is stored in eight bits, and its scales are "
                f"missing: {' or '.join(names)}"
            )
        scales = self._stored(present[0]).float() * self._quantization.unit
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(out_size, 1)
        elif scales.ndim == 1:
            scales = scales[:, None]
        for rows, columns in ((1, in_size), *self._quantization.blocks):
            if scales.shape == (-(-out_size // rows), -(-in_size // columns)):
                return scales, (rows, columns)
        raise DependencyError(
            f"{self.folder}: tensor {present[0]} has shape {tuple(scales.shape)}, which fits "
            f"neither the rows of {name} nor the blocks that config.json names"
        )


def _holds_nan(values: torch.Tensor) -> bool:
    if values.dtype == torch.int8:
        return False
    if values.dtype == torch.float8_e5m2:
        return bool(values.float().isnan().any())
    return bool(((values.view(torch.uint8) & _NOT_A_NUMBER) == _NOT_A_NUMBER).any())
