"""Settings of a model on a GPU; torch-free, read before anything heavy is imported."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvindex.foundation.errors import ConfigError
from worker.gpu.dispatcher import CudaGraphMode

Device = Literal["auto", "cpu", "cuda"]


class GpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model runs and how it uses a GPU.

    `device` "auto" is a GPU if there is one. `memory_utilization` is the share of its memory that
    weights, activations, graphs and KV cache may take together. `enforce_eager` is graph mode
    "none". `profile_dir` keeps memory profiles from one start to the next, None keeps none.
    """

    device: Device = "auto"
    memory_utilization: float = 0.92
    graph_mode: CudaGraphMode = "full_and_piecewise"
    enforce_eager: bool = False
    profile_dir: str | None = None

    @property
    def effective_graph_mode(self) -> CudaGraphMode:
        """The mode in force."""
        return "none" if self.enforce_eager else self.graph_mode

    def __post_init__(self) -> None:
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.memory_utilization:g}; expected more than 0 and "
                "at most 1"
            )
