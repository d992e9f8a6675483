"""What must hold for every row of every format: counts, times and chains.

A row that breaks a rule is an error with its line, never skipped: a trace that is read wrongly
gives hit rates that look plausible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sim.traces.row import TraceHeader, TraceRow
from sim.traces.source import TraceSource


class RowValidator:
    """Checks rows in their order and passes them on; keeps one entry per distinct block."""

    def __init__(self, source: TraceSource, header: TraceHeader) -> None:
        self._source = source
        self._header = header
        self._last_arrival_s = -math.inf
        self._parents: dict[int, int | None] = {}

    def check(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        """Yield the same rows; raise TraceError at the first that cannot be right."""
        for row in rows:
            self._check_numbers(row)
            self._check_time(row)
            if row.hash_ids is not None:
                self._check_count(row, row.hash_ids)
                self._check_chain(row, row.hash_ids)
            yield row

    def _check_numbers(self, row: TraceRow) -> None:
        for field in ("input_length", "output_length"):
            if (value := getattr(row, field)) < 0:
                raise self._source.error(row.line, f"{field} is negative ({value})")
        if not math.isfinite(row.arrival_s):
            raise self._source.error(row.line, f"the time {row.arrival_s} is not finite")

    def _check_time(self, row: TraceRow) -> None:
        if row.arrival_s < self._last_arrival_s:
            raise self._source.error(
                row.line,
                f"time runs backwards: {row.arrival_s:.6g} s after {self._last_arrival_s:.6g} s; "
                "sort the rows by time",
            )
        self._last_arrival_s = row.arrival_s

    def _check_count(self, row: TraceRow, ids: tuple[int, ...]) -> None:
        header = self._header
        expected = header.num_blocks(row.input_length)
        if expected is None:
            raise self._source.error(
                row.line, "hash_ids without a block size; state it in the header or --block-size"
            )
        tolerance = 1 if header.lengths == "approximate" else 0
        if abs(len(ids) - expected) > tolerance:
            raise self._source.error(
                row.line,
                f"{len(ids)} hash_ids for {row.input_length} tokens, but blocks of "
                f"{header.block_size} with tail {header.tail!r} give {expected}; "
                + self._count_remedy(len(ids) - expected),
            )

    def _count_remedy(self, excess: int) -> str:
        if abs(excess) > 1 or self._header.lengths == "approximate":
            return "is the block size right?"
        other = "ceil" if self._header.tail == "floor" else "floor"
        return (
            f"the tail may be {other!r}, or lengths approximate (not counted by the tokenizer "
            "that made the blocks): say so in the header, or with --tail or --lengths"
        )

    def _check_chain(self, row: TraceRow, ids: tuple[int, ...]) -> None:
        before: tuple[int | None, ...] = (None, *ids[:-1])[: len(ids)]
        known = tuple(map(self._parents.setdefault, ids, before))
        if known == before:
            return
        depth = next(i for i in range(len(ids)) if known[i] != before[i])
        raise self._source.error(
            row.line,
            f"id {ids[depth]} follows {_name(before[depth])} here and {_name(known[depth])} in an "
            "earlier row, but an id must stand for one whole prefix: are the ids local to a "
            'conversation? Then say "hash_scope": "local" in the header',
        )


def _name(parent: int | None) -> str:
    return "the start of the prompt" if parent is None else f"id {parent}"
