"""The GPU path on CPU tensors, with a fake that records what CUDA graphs would replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from worker.gpu.decoder import GpuDecoder
from worker.gpu.device import MemoryUse
from worker.gpu.dispatcher import CudaGraphMode, GraphDispatcher
from worker.gpu.model import GpuModel
from worker.gpu.step_buffers import StepBuffers
from worker.model.config import read_model_config
from worker.model.load_decoder import load_weights
from worker.model.shard import shard_of

CPU = torch.device("cpu")


@dataclass(slots=True)
class FakeGraph:
    """Recorded work that is simply done again, on the same buffers."""

    work: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.work()


@dataclass(slots=True)
class FakeGraphs:
    """Does what CudaGraphs does as far as a CPU can: `work` is bound to static buffers."""

    graphs: list[FakeGraph] = field(default_factory=list)

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1]

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


def gpu_model(
    folder: Path,
    *,
    graphs: FakeGraphs,
    mode: CudaGraphMode = "none",
    sizes: tuple[int, ...] = (1, 2, 4),
    max_num_seqs: int = 4,
    tokens_per_decode: int = 1,
) -> GpuModel:
    """Load a folder in float32 for at most 64 tokens a step and 128 positions."""
    config = read_model_config(folder)
    weights = load_weights(folder, config, shard_of(config, rank=0, size=1), dtype=torch.float32)
    decoder = GpuDecoder(
        config, weights, max_tokens=64, num_positions=128, num_processors=8, device=CPU
    )
    buffers = StepBuffers(max_tokens=64, max_num_seqs=max_num_seqs, max_blocks=8, device=CPU)
    dispatcher = GraphDispatcher(
        mode, sizes, max_num_seqs=max_num_seqs, tokens_per_decode=tokens_per_decode
    )
    return GpuModel(decoder, buffers, dispatcher, graphs)


@dataclass(slots=True)
class FakeDevice:
    """A GPU of 100 MB that is a CPU: captures take 3 MB the first time, then 1 MB each.

    `num_resets` counts measurements of a peak.
    """

    graphs: FakeGraphs = field(default_factory=FakeGraphs)
    name: str = "fake"
    total_bytes: int = 100_000_000
    num_processors: int = 2
    torch_device: torch.device = CPU
    used_by_others: int = 2_000_000
    allocated: int = 0
    activations: int = 5_000_000
    num_resets: int = 0

    def memory(self) -> MemoryUse:
        count = len(self.graphs.graphs)
        graphs = 2_000_000 + 1_000_000 * count if count else 0
        return MemoryUse(
            free=self.total_bytes - self.used_by_others - self.allocated - graphs,
            allocated=self.allocated,
            peak=self.allocated + self.activations,
            reserved=self.allocated,
        )

    def reset_peak(self) -> None:
        self.num_resets += 1

    def graph_backend(self) -> FakeGraphs:
        self.graphs = FakeGraphs()
        return self.graphs
