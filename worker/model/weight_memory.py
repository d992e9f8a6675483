"""Memory for the weights of one model: one region, in the order in which a step reads them.

A step reads all of it, so it is in large pages where the system has them, and what follows in
memory is what is needed next. It knows no layers.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_LINE_BYTES = 64


class WeightMemory:
    """Takes copies of tensors, up to `num_bytes` of them in `num_tensors` tensors.

    The copies keep the region alive, this object does not have to be kept.
    """

    def __init__(self, num_bytes: int, *, num_tensors: int) -> None:
        size = max(1, num_bytes + num_tensors * _LINE_BYTES)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor behind the last one, at the start of a line."""
        copy = torch.frombuffer(
            self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used
        ).view(tensor.shape)
        copy.copy_(tensor)
        self._used += -(-copy.nbytes // _LINE_BYTES) * _LINE_BYTES
        return copy
