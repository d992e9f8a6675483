"""CSV traces of load: times and lengths, no word about prefixes, so hits are unknown, never 0.

Azure's 2023 and 2024 traces (TIMESTAMP, ContextTokens, GeneratedTokens) and BurstGPT (Timestamp,
Model, Request tokens, Response tokens, and in newer files Session ID).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sim.traces.format import Described, Format, Stated, require_agreement
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.source import TraceSource

_NOTE = "lengths only: hits unknown"
_EPOCH = datetime.fromtimestamp(0, UTC)
_US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Which column holds what; `microseconds` reads the time, from any zero."""

    time: str
    input_length: str
    output_length: str
    microseconds: Callable[[str], int]
    model: str | None = None
    session: str | None = None


def _instant_us(text: str) -> int:
    """Read an absolute time, UTC if it names no zone; digits below a microsecond are cut off."""
    instant = datetime.fromisoformat(text)
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return (instant - _EPOCH) // timedelta(microseconds=1)


def _seconds_us(text: str) -> int:
    return round(float(text) * _US_PER_S)


_AZURE = _Columns(
    time="TIMESTAMP",
    input_length="ContextTokens",
    output_length="GeneratedTokens",
    microseconds=_instant_us,
)
_BURSTGPT = _Columns(
    time="Timestamp",
    input_length="Request tokens",
    output_length="Response tokens",
    microseconds=_seconds_us,
    model="Model",
    session="Session ID",
)


def _format(name: str, columns: _Columns) -> Format:
    def recognises(line: bytes) -> bool:
        needed = {columns.time, columns.input_length, columns.output_length}
        return needed <= set(_cells(line))

    def read(source: TraceSource, header: TraceHeader, stated: Stated) -> Iterator[TraceRow]:
        return _rows(source, columns)

    return Format(name=name, recognises=recognises, describe=_describe, read=read)


def _describe(source: TraceSource, stated: Stated) -> Described:
    header = TraceHeader(time_unit="s")
    require_agreement(source, stated, header)
    return Described(header, (_NOTE,))


def _rows(source: TraceSource, columns: _Columns) -> Iterator[TraceRow]:
    lines = source.lines()
    _, head = next(lines)
    names = _cells(head)
    zero_us: int | None = None
    for number, line in lines:
        cells = _cells(line)
        if len(cells) != len(names):
            raise source.error(number, f"{len(cells)} columns, the first line has {len(names)}")
        cell = dict(zip(names, cells, strict=True))
        try:
            at_us = columns.microseconds(cell[columns.time])
            input_length = int(cell[columns.input_length])
            output_length = int(cell[columns.output_length])
        except ValueError as error:
            raise source.error(number, str(error)) from None
        zero_us = at_us if zero_us is None else zero_us
        yield TraceRow(
            line=number,
            arrival_s=(at_us - zero_us) / _US_PER_S,
            input_length=input_length,
            output_length=output_length,
            model=_optional(cell, columns.model),
            session_id=_optional(cell, columns.session),
        )


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace")]))


def _optional(cell: dict[str, str], column: str | None) -> str | None:
    return (cell.get(column) or None) if column is not None else None


AZURE = _format("azure", _AZURE)
BURSTGPT = _format("burstgpt", _BURSTGPT)
