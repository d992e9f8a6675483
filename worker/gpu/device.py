"""What a GPU tells of itself, and how much of it this process uses.

The seam to the hardware: the tests measure on a fake. It decides nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kvindex.foundation.errors import ConfigError
from worker.gpu.config import GpuConfig
from worker.gpu.graphs import CudaGraphs, GraphBackend


class MemoryUse(NamedTuple):
    """Bytes of the device at one moment.

    `allocated` is held by tensors of this process, `peak` the most since the last reset,
    `reserved` what its allocator took from the device; `free` counts all processes.
    """

    free: int
    allocated: int
    peak: int
    reserved: int


class GpuDevice(Protocol):
    """One GPU. Implementations: CudaDevice, and a fake in the tests."""

    name: str
    total_bytes: int
    num_processors: int
    torch_device: torch.device

    def memory(self) -> MemoryUse:
        """Wait for what runs, and return what is used now."""
        ...

    def reset_peak(self) -> None:
        """Give cached memory back and start a new measurement of the peak."""
        ...

    def graph_backend(self) -> GraphBackend:
        """Return what captures graphs."""
        ...


class CudaDevice:
    """A CUDA device, made the current one of this thread."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name = str(properties.name)
        self.num_processors = int(properties.multi_processor_count)
        self.total_bytes = int(torch.cuda.mem_get_info(self.torch_device)[1])

    def memory(self) -> MemoryUse:
        """Wait for what runs, and return what is used now."""
        torch.cuda.synchronize(self.torch_device)
        return MemoryUse(
            free=int(torch.cuda.mem_get_info(self.torch_device)[0]),
            allocated=torch.cuda.memory_allocated(self.torch_device),
            peak=torch.cuda.max_memory_allocated(self.torch_device),
            reserved=torch.cuda.memory_reserved(self.torch_device),
        )

    def reset_peak(self) -> None:
        """Give cached memory back and start a new measurement of the peak."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def graph_backend(self) -> GraphBackend:
        """Return what captures graphs."""
        return CudaGraphs(self.torch_device)


def find_gpu(gpu: GpuConfig) -> GpuDevice | None:
    """Return the GPU that the settings ask for, None for the CPU; ConfigError if it is missing."""
    if gpu.device == "cpu":
        return None
    if torch.cuda.is_available():
        return CudaDevice()
    if gpu.device == "cuda":
        raise ConfigError(
            "worker.device is cuda, and torch finds no GPU here; set it to cpu or auto, or "
            "install torch for CUDA"
        )
    return None
