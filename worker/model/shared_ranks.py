"""Collective operations of ranks on one machine, through memory that they share.

A sum over loopback sockets costs a millisecond, and a step needs two in every layer; here a rank
writes its part beside the others' and waits for theirs (measured in docs/log.md). It relies on
x86 making one core's writes visible in the order in which they were made.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from worker.model.parallel import COLLECTIVE_TIMEOUT, RankGroup

_FOLDER = Path("/dev/shm")
_CACHE_LINE_BYTES = 64
_PART_FLOATS = 1 << 20
"""Larger tensors go in several parts."""

_SPINS_PER_LOOK = 1024
_POLL_S = 0.005


def can_share_memory() -> bool:
    """Tell whether this machine keeps what SharedMemoryRanks relies on."""
    return platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir()


class SharedMemoryRanks(RankGroup):
    """Ranks that meet at a file; its memory is gone when the last of them is.

    Parts are written to one of two boards in turn. A rank that begins to write to a board has
    seen all others write to the other one, so they have read what this one held.
    """

    def __init__(self, rank: int, size: int, *, rendezvous: Path) -> None:
        super().__init__(rank, size)
        flag_bytes = -(-size * _CACHE_LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        num_floats = 2 * size * _PART_FLOATS
        file = self._meet(rendezvous, flag_bytes + 4 * num_floats)
        with file.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 0)
        stride = _CACHE_LINE_BYTES // 8
        self._written = np.frombuffer(self._memory, np.int64, size * stride)[::stride]
        self._boards = torch.frombuffer(
            self._memory, dtype=torch.float32, offset=flag_bytes, count=num_floats
        ).view(2, size, _PART_FLOATS)
        self._num_exchanges = 0
        self._exchange(torch.zeros(1))
        if rank == 0:
            file.unlink()

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up every rank's `partial`; all add in the order of ranks, so they get the same."""
        flat = partial.float().flatten()
        total = torch.empty_like(flat)
        for start in range(0, len(flat), _PART_FLOATS):
            part = slice(start, start + _PART_FLOATS)
            torch.sum(self._exchange(flat[part]), dim=0, out=total[part])
        return total.view(partial.shape).to(partial.dtype)

    def join_columns(self, columns: torch.Tensor, *, total: int) -> torch.Tensor:
        """Put every rank's [rows, n] float32 side by side and cut to [rows, total]."""
        flat = columns.flatten()
        parts = torch.empty(self.size, len(flat))
        for start in range(0, len(flat), _PART_FLOATS):
            part = slice(start, start + _PART_FLOATS)
            parts[:, part] = self._exchange(flat[part])
        return parts.view(self.size, *columns.shape).transpose(0, 1).flatten(1)[:, :total]

    def smallest(self, number: int) -> int:
        """Return the smallest of every rank's number, which is below 2**53."""
        exact = torch.tensor([number], dtype=torch.float64).view(torch.float32)
        return int(self._exchange(exact).clone().view(torch.float64).min())

    def _exchange(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's part, [ranks, floats]; it holds until the exchange after next.

        TimeoutError when one does not come.
        """
        self._num_exchanges += 1
        board = self._boards[self._num_exchanges % 2, :, : len(part)]
        board[self.rank] = part
        self._written[self.rank] = self._num_exchanges
        deadline = None
        while self._written.min() < self._num_exchanges:
            for _ in range(_SPINS_PER_LOOK):
                if self._written.min() >= self._num_exchanges:
                    return board
                os.sched_yield()
            deadline = deadline or time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waits in vain for {self._written.tolist()}")
        return board

    def _meet(self, rendezvous: Path, num_bytes: int) -> Path:
        """Agree on a file of `num_bytes` zeros: rank 0 makes it, and leaves its name for others."""
        if self.rank == 0:
            descriptor, name = tempfile.mkstemp(prefix="prefixfleet-ranks-", dir=_FOLDER)
            os.ftruncate(descriptor, num_bytes)
            os.close(descriptor)
            note = rendezvous.with_suffix(".new")
            note.write_text(name)
            note.rename(rendezvous)
        deadline = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
        while not rendezvous.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waits in vain for rank 0")
            time.sleep(_POLL_S)
        return Path(rendezvous.read_text())
