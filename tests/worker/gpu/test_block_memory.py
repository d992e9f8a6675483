"""Blocks on the device move as those on a CPU do, and stay where they are."""

from __future__ import annotations

import torch

from engine.transfer import BlockCopy, HostLoad, HostStore
from worker.gpu.block_memory import GpuBlockMemory


def test_blocks_move_in_order_and_the_device_is_waited_for() -> None:
    waits: list[None] = []
    memory = GpuBlockMemory(
        num_layers=2,
        num_blocks=4,
        num_host_blocks=1,
        block_shape=(2, 1, 3),
        dtype=torch.float32,
        device=torch.device("cpu"),
        wait=lambda: waits.append(None),
    )
    memory.cache.keys[:, 1] = 1.0
    memory.cache.values[:, 1] = 2.0
    assert memory.move([]) == 0.0
    assert waits == []
    took_s = memory.move([BlockCopy(1, 2), HostStore(2, 0), BlockCopy(3, 2), HostLoad(0, 3)])
    assert took_s > 0.0
    assert len(waits) == 1
    assert memory.cache.keys[0, :, 0, 0, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert memory.cache.values[1, :, 1, 0, 2].tolist() == [0.0, 2.0, 0.0, 2.0]


def test_a_pool_that_shrinks_keeps_its_address() -> None:
    memory = GpuBlockMemory(
        num_layers=1,
        num_blocks=4,
        num_host_blocks=0,
        block_shape=(2, 1, 3),
        dtype=torch.float32,
        device=torch.device("cpu"),
        wait=lambda: None,
    )
    address = memory.cache.keys.data_ptr()
    memory.resize(2)
    memory.resize(4)
    assert memory.cache.keys.data_ptr() == address
    assert memory.cache.keys.shape[1] == 4
