"""Mooncake's JSON lines and our canonical superset, `kvtrace/1`, which adds a header line.

A row has timestamp, input_length, output_length and hash_ids, one id per block, an id standing
for its whole prefix. Mooncake files have no header: milliseconds, global ids, and a block size
that nothing in the file states; it is inferred when the rows leave only one (block_size.py).
Fields that nobody here needs (agent_id, for one) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sim.traces.block_size import RowCounts, infer_blocks
from sim.traces.format import (
    ChainIds,
    Described,
    Format,
    Stated,
    json_keys,
    require_agreement,
)
from sim.traces.row import NUM_MS_PER_S, Outcome, TraceHeader, TraceRow
from sim.traces.source import TraceSource


class MooncakeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as written; `timestamp` in the file's unit, `delay_ms` always in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None
    request_id: str | int | None = None
    session_id: str | int | None = None
    parent_id: str | int | None = None
    delay_ms: float | None = None
    tenant: str | None = None
    model: str | None = None
    priority: int = 0
    output_hash_ids: tuple[int, ...] | None = None
    group: str | None = None
    client_salt: str | None = None
    outcome: Outcome | None = None


_ROW = msgspec.json.Decoder(MooncakeRow)
_HEADER = msgspec.json.Decoder(TraceHeader)


def _recognises_header(line: bytes) -> bool:
    return "schema" in json_keys(line)


def _recognises_row(line: bytes) -> bool:
    return {"timestamp", "input_length", "output_length"} <= json_keys(line)


def _read_header(source: TraceSource, stated: Stated) -> Described:
    number, line = source.first_line()
    header = source.decode(_HEADER, number, line)
    if header.block_size is not None and header.block_size < 1:
        raise source.error(number, f"block_size must be at least 1 (is {header.block_size})")
    require_agreement(source, stated, header)
    return Described(header)


def _describe_mooncake(source: TraceSource, stated: Stated) -> Described:
    return infer_blocks(source, _counts(source), stated)


def _counts(source: TraceSource) -> Iterator[RowCounts]:
    for number, row in _numbered_rows(source, skip_header=False):
        num_ids = None if row.hash_ids is None else len(row.hash_ids)
        yield RowCounts(number, row.input_length, num_ids)


def _numbered_rows(source: TraceSource, *, skip_header: bool) -> Iterator[tuple[int, MooncakeRow]]:
    lines = source.lines()
    if skip_header:
        next(lines)
    for number, line in lines:
        yield number, source.decode(_ROW, number, line)


def _read_canonical(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    rows = (_row(number, wire, header) for number, wire in _numbered_rows(source, skip_header=True))
    return rows if header.hash_scope == "global" else _namespaced(source, rows)


def _read_mooncake(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
    for number, wire in _numbered_rows(source, skip_header=False):
        yield _row(number, wire, header)


def _namespaced(source: TraceSource, rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """Make ids that are local to a session global."""
    ids = ChainIds()
    for row in rows:
        if row.session_id is None:
            raise source.error(row.line, 'hash_scope is "local", so the row needs a session_id')
        if row.hash_ids is None:
            yield row
            continue
        prompt = ids.extend(row.session_id, row.hash_ids)
        output = row.output_hash_ids
        if output is not None:
            output = ids.extend(row.session_id, row.hash_ids + output)[len(prompt) :]
        yield msgspec.structs.replace(row, hash_ids=prompt, output_hash_ids=output)


def _row(line: int, wire: MooncakeRow, header: TraceHeader) -> TraceRow:
    per_s = NUM_MS_PER_S if header.time_unit == "ms" else 1
    return TraceRow(
        line=line,
        arrival_s=wire.timestamp / per_s,
        input_length=wire.input_length,
        output_length=wire.output_length,
        hash_ids=wire.hash_ids,
        request_id=_text(wire.request_id),
        session_id=_text(wire.session_id),
        parent_id=_text(wire.parent_id),
        delay_s=None if wire.delay_ms is None else wire.delay_ms / NUM_MS_PER_S,
        tenant=wire.tenant,
        model=wire.model,
        priority=wire.priority,
        output_hash_ids=wire.output_hash_ids,
        group=wire.group,
        client_salt=wire.client_salt,
        outcome=wire.outcome,
    )


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)


CANONICAL = Format(
    name="kvtrace",
    recognises=_recognises_header,
    describe=_read_header,
    read=_read_canonical,
)

MOONCAKE = Format(
    name="mooncake",
    recognises=_recognises_row,
    describe=_describe_mooncake,
    read=_read_mooncake,
)
