"""The bytes of KV blocks on a GPU, with the host tier in pinned memory.

The pool stays where it is for good, because CUDA graphs hold its address: a pool that shrinks
leaves its memory taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from engine.transfer import BlockTransfer
from worker.model.llama import KVCache
from worker.runner.block_memory import BlockMemory


class GpuBlockMemory(BlockMemory):
    """See BlockMemory; `wait` waits for the device, so that moves can be timed."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        wait: Callable[[], object],
    ) -> None:
        shape = (num_layers, num_blocks, *block_shape)
        self.cache = KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
        host_shape = (num_host_blocks, num_layers, *block_shape)
        is_pinned = device.type == "cuda" and num_host_blocks > 0
        self._host = KVCache(
            *(torch.zeros(host_shape, dtype=dtype, pin_memory=is_pinned) for _ in range(2))
        )
        self._wait = wait

    def move(self, transfers: Sequence[BlockTransfer]) -> float:
        """Carry out moves in order; return the seconds until all were done."""
        if not transfers:
            return 0.0
        started = time.perf_counter()
        super().move(transfers)
        self._wait()
        return time.perf_counter() - started

    def resize(self, num_blocks: int) -> None:
        """Keep the memory: graphs hold its address."""
