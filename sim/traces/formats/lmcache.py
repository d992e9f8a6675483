"""LMCache's look-up log: JSON lines with chunk_hashes, one per whole chunk, and seq_len.

Older logs state neither chunk size nor time. There are no output lengths in it: they are 0, so
the trace serves questions about hits, not about decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sim.traces.format import (
    ChainIds,
    Described,
    Format,
    LogClock,
    Stated,
    json_keys,
    require_agreement,
    require_block_size,
)
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.source import TraceSource


class LookupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A look-up as logged; `timestamp` in seconds of the epoch."""

    chunk_hashes: tuple[str | int, ...]
    seq_len: int
    chunk_size: int | None = None
    timestamp: float | None = None
    request_id: str | None = None
    model_name: str | None = None


_ROW = msgspec.json.Decoder(LookupRow)


def _recognises(line: bytes) -> bool:
    return {"chunk_hashes", "seq_len"} <= json_keys(line)


def _describe(source: TraceSource, stated: Stated) -> Described:
    number, line = source.first_line()
    first = source.decode(_ROW, number, line)
    size = first.chunk_size
    if size is None:
        size = require_block_size(source, stated, why="the log has no chunk_size")
    header = TraceHeader(block_size=size, tail="floor", time_unit="s")
    require_agreement(source, stated, header)
    notes = ["no output lengths: they are 0"]
    if first.timestamp is None:
        notes.append(LogClock.NO_TIMES)
    return Described(header, tuple(notes))


def _read(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    ids = ChainIds()
    clock = LogClock(source)
    for number, line in source.lines():
        wire = source.decode(_ROW, number, line)
        if wire.chunk_size not in (None, header.block_size):
            raise source.error(
                number, f"chunk_size is {wire.chunk_size}, in the first row {header.block_size}"
            )
        yield TraceRow(
            line=number,
            arrival_s=clock.arrival_s(number, wire.timestamp),
            input_length=wire.seq_len,
            output_length=0,
            # The log hashes tokens only: blocks of two models are never the same block.
            hash_ids=ids.extend(wire.model_name, wire.chunk_hashes),
            request_id=wire.request_id,
            model=wire.model_name,
        )


LMCACHE = Format(
    name="lmcache",
    recognises=_recognises,
    describe=_describe,
    read=_read,
)
