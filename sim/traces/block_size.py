"""The block size of a file that does not state it, by elimination.

A row with L tokens and n ids leaves a range of block sizes: ceil(L / b) = n or floor(L / b) = n.
Rows together often leave a single size. If they leave none or several, that is an error, never a
default: a wrong block size gives hit rates that look plausible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from sim.traces.errors import TraceError
from sim.traces.format import Described, Stated
from sim.traces.row import Tail, TraceHeader
from sim.traces.source import TraceSource

MAX_ROWS_READ = 2000
_APPROXIMATE_REMEDY = (
    "if lengths were not counted by the tokenizer that made the blocks, state --block-size N "
    "--lengths approximate"
)


class RowCounts(NamedTuple):
    """What of a row tells the block size; `num_ids` is None for a row without hash_ids."""

    line: int
    input_length: int
    num_ids: int | None


@dataclass(slots=True)
class _Sizes:
    """The block sizes, both ends included, that fit all rows up to the first that none fits."""

    tail: Tail
    low: int
    high: int
    num_fitting: int = 0
    misfit: RowCounts | None = None

    def take(self, row: RowCounts) -> None:
        low, high = _range(row, self.tail)
        low, high = max(low, self.low), self.high if high is None else min(high, self.high)
        if low <= high:
            self.num_fitting += 1
            if self.misfit is None:
                self.low, self.high = low, high
        elif self.misfit is None:
            self.misfit = row

    def in_words(self) -> str:
        sizes = str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
        return f"{sizes} with tail {self.tail!r}"


def infer_blocks(source: TraceSource, rows: Iterable[RowCounts], stated: Stated) -> Described:
    """Return the header of a file without one.

    Reads at most the first 2,000 rows. Raises TraceError when they leave no block size, or
    several, and the caller has stated none. A stated one need not fit: reading the rows tells
    which does not.
    """
    read = [row for row in islice(rows, MAX_ROWS_READ) if row.num_ids is not None]
    if not read:
        return Described(TraceHeader(tail="ceil"), ("no hash_ids: lengths only, hits unknown",))
    if stated.lengths == "approximate":
        return _approximate(source, stated)
    candidates = [_fit(read, tail, stated) for tail in _tails(stated)]
    # Where every length is whole blocks both tails fit; then Mooncake's own, ceil, is as right.
    best = max(candidates, key=lambda sizes: (sizes.misfit is None, sizes.num_fitting))
    if stated.block_size is not None:
        notes = () if stated.tail else (f"tail {best.tail!r}, by the first {len(read)} rows",)
        return Described(TraceHeader(block_size=stated.block_size, tail=best.tail), notes)
    if best.misfit is not None:
        raise _no_size(source, best, best.misfit)
    left = [sizes for sizes in candidates if sizes.misfit is None]
    if {(sizes.low, sizes.high) for sizes in left} != {(best.low, best.low)}:
        fits = ", or ".join(sizes.in_words() for sizes in left)
        raise TraceError(
            source.path,
            f"block size unknown: the rows fit {fits}; state it with --block-size N (and --tail)",
        )
    note = f"block size {best.low}, tail {best.tail!r}: all that fits the first {len(read)} rows"
    return Described(TraceHeader(block_size=best.low, tail=best.tail), (note,))


def _approximate(source: TraceSource, stated: Stated) -> Described:
    if stated.block_size is None:
        raise TraceError(
            source.path, "block size unknown: approximate lengths do not tell it; add --block-size"
        )
    return Described(
        TraceHeader(
            block_size=stated.block_size, tail=stated.tail or "ceil", lengths="approximate"
        ),
        ("lengths are approximate: a row may have one id more or less than they give",),
    )


def _tails(stated: Stated) -> tuple[Tail, ...]:
    return ("ceil", "floor") if stated.tail is None else (stated.tail,)


def _fit(read: list[RowCounts], tail: Tail, stated: Stated) -> _Sizes:
    size = stated.block_size
    longest = max(row.input_length for row in read) + 1
    sizes = _Sizes(tail, 1, longest) if size is None else _Sizes(tail, size, size)
    for row in read:
        sizes.take(row)
    return sizes


def _range(row: RowCounts, tail: Tail) -> tuple[int, int | None]:
    """Return the smallest and the largest block size that give a row its ids.

    The largest is None where there is no limit, and below the smallest where no size fits.
    """
    length, num_ids = row.input_length, row.num_ids or 0
    if tail == "floor":
        # floor(L / b) = n means n b <= L < (n + 1) b.
        return length // (num_ids + 1) + 1, length // num_ids if num_ids else None
    if num_ids == 0:
        return (1, None) if length == 0 else (1, 0)
    # ceil(L / b) = n means (n - 1) b < L <= n b.
    return -(-length // num_ids), (length - 1) // (num_ids - 1) if num_ids > 1 else None


def _no_size(source: TraceSource, sizes: _Sizes, misfit: RowCounts) -> TraceError:
    return source.error(
        misfit.line,
        f"{misfit.num_ids} hash_ids for {misfit.input_length} tokens, but the rows before leave "
        f"only blocks of {sizes.in_words()}; {_APPROXIMATE_REMEDY}",
    )
