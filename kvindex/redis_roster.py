"""What a client knows of a pool's targets between its matches, so that they are not told again.

The live targets, their slots and their reports change far less often than they are matched. The
server says with each match what has changed (lua/match.lua); nothing here ever asks.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvindex.index import LoadReport, Target, TargetMatch
from kvindex.redis_layout import hit_blocks

_report_decoder = msgspec.msgpack.Decoder(LoadReport)
_LOAD = struct.Struct(">QQQ")
_NO_LOAD = (0, 0, 0)
_NO_HINT = (2**32 - 1,)


class Hints(NamedTuple):
    """How many blocks of a chain were held at each place, four bytes each."""

    places: tuple[bytes, ...]
    matched: bytes


class Found(NamedTuple):
    """What lua/match.lua returns behind the roster; its header says what each is."""

    matched: bytes
    loads: Sequence[Sequence[bytes]]
    pending: Sequence[tuple[int, int]]
    on_gpu: bytes
    presences: Sequence[tuple[int, Sequence[int | bytes]]]


class Roster:
    """The live targets of a pool, a row each, as of one stamp; reports are kept up to date.

    A roster is a value but for its reports: a target that comes or goes makes another one.
    """

    def __init__(self, stamp: bytes, columns: Sequence[Sequence[Any]], *, last_report: int) -> None:
        """Take over the columns that lua/match.lua returns."""
        names, epochs, places, layouts, reports = columns
        self._last_report = last_report
        self._row_of = {name: row for row, name in enumerate(names)}
        self._targets = [parse_target(name) for name in names]
        self._epochs = [int(epoch) for epoch in epochs]
        self._layouts: list[bytes | None] = list(layouts)
        self._reports = [decode_report(report) for report in reports]
        self._order = sorted(range(len(names)), key=self._targets.__getitem__)
        self._places: tuple[bytes, ...] = tuple(places)
        self._stamp = stamp
        self._rows = (
            len(names),
            b"".join(places),
            _layout_heads(layouts),
            b"".join([len(name).to_bytes(2, "big") + name for name in names]),
        )

    def known(self, hints: Hints | None) -> tuple[bytes | int, ...]:
        """Return what a match is told of what is known here."""
        told = b"" if hints is None else self._by_row(hints)
        return self._stamp, self._last_report, *self._rows, told

    def hints(self, found: Found) -> Hints:
        """Return what an answer leaves to be known for the next chain that begins alike."""
        return Hints(self._places, found.matched)

    def _by_row(self, hints: Hints) -> bytes:
        """Return what hints say of each row; they may be of a roster before this one."""
        if hints.places is self._places:
            return hints.matched
        matched = dict(zip(hints.places, struct.iter_unpack(">I", hints.matched), strict=True))
        by_row = [matched.get(place, _NO_HINT)[0] for place in self._places]
        return struct.pack(f">{len(by_row)}I", *by_row)

    def update(self, last_report: int, reports: Sequence[bytes]) -> None:
        """Take in what was reported since; an answer that another one has overtaken is too old."""
        if last_report <= self._last_report:
            return
        self._last_report = last_report
        for name, report in zip(reports[::2], reports[1::2], strict=True):
            row = self._row_of.get(name)
            if row is not None:
                self._reports[row] = decode_report(report)

    def matches(self, found: Found, *, num_hashes: int) -> list[TargetMatch]:
        """Put the rows of an answer together, in the order of their targets."""
        num_rows = len(self._targets)
        lengths = struct.Struct(f">{num_rows}I")
        matched = list(lengths.unpack(found.matched))
        on_gpu = list(lengths.unpack(found.on_gpu)) if found.on_gpu else matched
        for place, presence in found.presences:
            layout = self._layouts[place - 1]
            assert layout is not None, "presence is told of rows with a layout only"
            matched[place - 1] = on_gpu[place - 1] = hit_blocks(layout, presence, num_hashes)
        loads, pending = self._loads(found.loads), dict(found.pending)
        return [
            TargetMatch(
                target=self._targets[row],
                epoch=self._epochs[row],
                matched_blocks=matched[row],
                host_blocks=matched[row] - on_gpu[row],
                pending_blocks=pending.get(row + 1, 0),
                reserved_prefill_tokens=loads[row][0],
                reserved_blocks=loads[row][1],
                num_reserved=loads[row][2],
                report=self._reports[row],
            )
            for row in self._order
        ]

    def _loads(self, by_gateway: Sequence[Sequence[bytes]]) -> list[tuple[int, int, int]]:
        """Sum what gateways have reserved, by row: tokens, blocks, requests."""
        sums = [_NO_LOAD] * len(self._targets)
        for reserved in by_gateway:
            for name, packed in zip(reserved[::2], reserved[1::2], strict=True):
                row = self._row_of.get(name)
                if row is not None:
                    before, more = sums[row], _LOAD.unpack(packed)
                    sums[row] = (before[0] + more[0], before[1] + more[1], before[2] + more[2])
        return sums


def no_roster() -> Roster:
    """Return what is known before the first match: nothing."""
    return Roster(b"", ([], [], [], [], []), last_report=0)


@functools.lru_cache(maxsize=4096)
def parse_target(text: bytes) -> Target:
    """Read a target as the keys of the index name it."""
    replica, _, dp_rank = text.decode().rpartition("/")
    return Target(replica, int(dp_rank))


def decode_report(packed: bytes) -> LoadReport:
    """Read a report as it was renewed with."""
    return _report_decoder.decode(packed)


def _layout_heads(layouts: Sequence[bytes | None]) -> bytes:
    """Return what the server reads of each layout; nothing when there are none."""
    if not any(layouts):
        return b""
    heads = [b"-" if layout is None else layout.partition(b"|")[0] for layout in layouts]
    return b" ".join(heads)
