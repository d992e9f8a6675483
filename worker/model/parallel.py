"""How the ranks of one model put their partial results together.

Every rank samples from the same logits, so no token needs to be sent. It knows no model: what a
rank computes is in shard.py.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=300)
"""Ranks wait so long for one that stands still; then they end, and the executor notices."""


class RankGroup:
    """The ranks of one model as seen by one of them; this one is alone.

    Every rank must call the same methods in the same order; each waits for the others there.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up every rank's `partial` in float32; all get the same bits, in its precision."""
        return partial

    def join_columns(self, columns: torch.Tensor, *, total: int) -> torch.Tensor:
        """Put every rank's [rows, n] side by side and cut to [rows, total]."""
        return columns[:, :total]

    def smallest(self, number: int) -> int:
        """Return the smallest of every rank's number."""
        return number

    def leave(self) -> None:
        """Say goodbye without waiting for anyone. Idempotent."""


class DistributedRanks(RankGroup):
    """Ranks anywhere, by torch.distributed: gloo on CPUs, NCCL on GPUs; once per process.

    They meet at a file or TCP URL that all can reach.
    """

    def __init__(self, rank: int, size: int, *, rendezvous: str, device: torch.device) -> None:
        super().__init__(rank, size)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
        )

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        total = partial.float().contiguous()
        dist.all_reduce(total)
        return total.to(partial.dtype)

    def join_columns(self, columns: torch.Tensor, *, total: int) -> torch.Tensor:
        columns = columns.contiguous()
        parts = [torch.empty_like(columns) for _ in range(self.size)]
        if columns.numel():
            dist.all_gather(parts, columns)
        return torch.cat(parts, dim=-1)[:, :total]

    def smallest(self, number: int) -> int:
        numbers: list[int] = [0] * self.size
        dist.all_gather_object(numbers, number)
        return min(numbers)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


ALONE = RankGroup()
"""The group of a model that one process holds whole."""
