"""The bytes of KV blocks on a CPU: those of the pool, those of the host tier, and their moves.

Which block moves where is decided by the scheduler; here it is done, and timed. Memory of blocks
that the pool has given up goes back to the operating system.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence

import torch

from engine.transfer import BlockCopy, BlockTransfer, HostLoad, HostStore
from worker.model.llama import KVCache


class BlockMemory:
    """`cache`, and a host tier of `num_host_blocks` blocks of the same layout.

    `block_shape` is [block_size, kv_heads, head_dim]. Nothing is taken from the machine before
    it is first written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        shape = (num_layers, num_blocks, *block_shape)
        self._maps = [mapped_zeros(shape, dtype) for _ in range(2)]
        self.cache = KVCache(*(tensor for tensor, _ in self._maps))
        host_shape = (num_host_blocks, num_layers, *block_shape)
        self._host = KVCache(*(torch.zeros(host_shape, dtype=dtype) for _ in range(2)))
        self._num_blocks = num_blocks

    def move(self, transfers: Sequence[BlockTransfer]) -> float:
        """Carry out moves in order; return the seconds that those to and from the host took."""
        started, copying_s = time.perf_counter(), 0.0
        pool, host = self.cache, self._host
        for transfer in transfers:
            match transfer:
                case BlockCopy(source=source, destination=destination):
                    copy_started = time.perf_counter()
                    pool.keys[:, destination] = pool.keys[:, source]
                    pool.values[:, destination] = pool.values[:, source]
                    copying_s += time.perf_counter() - copy_started
                case HostStore(block_id=block_id, host_block_id=host_block_id):
                    host.keys[host_block_id] = pool.keys[:, block_id]
                    host.values[host_block_id] = pool.values[:, block_id]
                case HostLoad(host_block_id=host_block_id, block_id=block_id):
                    pool.keys[:, block_id] = host.keys[host_block_id]
                    pool.values[:, block_id] = host.values[host_block_id]
        return time.perf_counter() - started - copying_s if transfers else 0.0

    def resize(self, num_blocks: int) -> None:
        """Give the memory of blocks from `num_blocks` on back; a pool that grows takes it anew.

        Whole pages only, so some bytes at the borders of each layer stay.
        """
        if num_blocks < self._num_blocks:
            for tensor, memory in self._maps:
                for layer in range(tensor.shape[0]):
                    _give_back(memory, tensor, layer, range(num_blocks, self._num_blocks))
        self._num_blocks = num_blocks


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    """Return a tensor over memory of its own pages, which can be given back in part."""
    num_bytes = max(1, math.prod(shape) * dtype.itemsize)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape), memory


def _give_back(memory: mmap.mmap, tensor: torch.Tensor, layer: int, blocks: range) -> None:
    """Let the pages go that lie wholly within some blocks of one layer."""
    layer_bytes, block_bytes = (tensor.stride(i) * tensor.itemsize for i in range(2))
    start = layer * layer_bytes + blocks.start * block_bytes
    end = layer * layer_bytes + blocks.stop * block_bytes
    first_page, end_page = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
    if end_page > first_page:
        memory.madvise(
            mmap.MADV_DONTNEED,
            first_page * mmap.PAGESIZE,
            (end_page - first_page) * mmap.PAGESIZE,
        )
