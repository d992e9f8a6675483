"""What a gateway has recorded so far, as one trace file of bounded length for a simulator.

The files of several processes of one gateway are one recording. It reads lines and timestamps, and
leaves everything else of a row as it is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvindex.foundation.errors import PrefixFleetError


class NothingRecordedError(PrefixFleetError):
    """Raised when there is no recording, or nothing in it yet."""

    kind = "nothing_recorded"


class _Row(msgspec.Struct, frozen=True):
    timestamp: float


_decoder = msgspec.json.Decoder(_Row)


def collect(files: list[Path], into: Path, *, max_rows: int) -> int:
    """Write the newest rows of some files, in the order of time, and return how many there are.

    Raises NothingRecordedError when none has a row.
    """
    headers: list[bytes] = []
    streams = [_rows(file, headers) for file in files if file.is_file()]
    newest = deque(heapq.merge(*streams, key=lambda row: row[0]), maxlen=max_rows)
    if not newest:
        raise NothingRecordedError("nothing has been recorded yet; let some traffic pass first")
    with into.open("wb") as trace:
        trace.write(headers[0])
        trace.writelines(line for _, line in newest)
    return len(newest)


def _rows(file: Path, headers: list[bytes]) -> Iterator[tuple[float, bytes]]:
    """Yield the rows of a file that may be growing: a last line without its end is left out."""
    with file.open("rb") as lines:
        header = lines.readline()
        if not header.endswith(b"\n"):
            return
        headers.append(header)
        for line in lines:
            if line.endswith(b"\n"):
                yield _decoder.decode(line).timestamp, line
