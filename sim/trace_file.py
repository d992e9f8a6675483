"""A trace by its file and what is stated about it: plain values that another process can open."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sim.traces.row import Lengths, Tail
from sim.traces.trace import Trace, open_trace


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trace is; the rest as `open_trace` takes it."""

    path: str
    format: str | None = None
    block_size: int | None = None
    tail: Tail | None = None
    lengths: Lengths | None = None

    def open(self) -> Trace:
        """Open it; raise TraceError when it cannot be read."""
        return open_trace(
            Path(self.path),
            format=self.format,
            block_size=self.block_size,
            tail=self.tail,
            lengths=self.lengths,
        )
