"""A trace for a fleet too small for it: the same blocks and the same reuse, fewer tokens in each.

It changes lengths only; ids, order and times stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvindex.foundation.errors import ConfigError
from sim.traces.row import TraceHeader, TraceRow


def shrunk_header(header: TraceHeader, factor: int) -> TraceHeader:
    """Return the header of a trace whose blocks are `factor` times smaller.

    Raises ConfigError when the blocks cannot be divided so, or when there are none.
    """
    size = header.block_size
    if size is None or factor < 1 or size % factor:
        raise ConfigError(
            f"--shrink {factor}: expected a divisor of the trace's block size, {size}"
        )
    return msgspec.structs.replace(header, block_size=size // factor)


def shrunk_rows(rows: Iterable[TraceRow], header: TraceHeader, factor: int) -> Iterator[TraceRow]:
    """Divide all lengths; `header` is that of the trace as it is.

    Whole blocks stay whole, and a partial last block keeps at least one token.
    """
    assert header.block_size is not None, "checked with the header"
    for row in rows:
        whole, rest = divmod(row.input_length, header.block_size)
        tail = max(1, rest // factor) if rest else 0
        if header.tail == "floor" and row.hash_ids is not None and rest:
            tail = rest // factor
        yield msgspec.structs.replace(
            row,
            input_length=max(1, whole * (header.block_size // factor) + tail),
            output_length=max(1, row.output_length // factor),
        )
