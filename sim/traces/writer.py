"""Writing a trace in the canonical form, `kvtrace/1`: a header line, then one row per line.

Equal rows give equal bytes, whatever the process: fields stand in a fixed order, absent ones are
left out, and times are rounded to a nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from sim.traces.errors import TraceError
from sim.traces.row import NUM_MS_PER_S, TraceHeader, TraceRow
from sim.traces.source import open_for_writing

_MS_DIGITS = 6
_ALWAYS = ("input_length", "output_length", "hash_ids")
_OPTIONAL = (
    "request_id",
    "session_id",
    "parent_id",
    "tenant",
    "model",
    "output_hash_ids",
    "group",
    "client_salt",
    "outcome",
)


class TraceWriter:
    """A canonical trace being written, row by row, in order of arrival.

    The header says what holds of rows in memory: global ids, milliseconds. A suffix .gz, .xz or
    .zst compresses. Raises TraceError when the file cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader, *, file: Path | None = None) -> None:
        """Create the file and write its header; `file` if it is to become `path` only later."""
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._stream = open_for_writing(file or path, target=path)
        self.num_rows = 0
        self._line(msgspec.structs.replace(header, hash_scope="global", time_unit="ms"))
        self.flush()

    def write(self, row: TraceRow) -> None:
        """Append one row."""
        self._line(_fields(row))
        self.num_rows += 1

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        with self._errors_named():
            self._stream.flush()

    def close(self) -> None:
        """Finish the file."""
        with self._errors_named():
            self._stream.close()

    def _line(self, value: object) -> None:
        with self._errors_named():
            self._stream.write(self._encoder.encode(value) + b"\n")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise TraceError(self._path, f"cannot be written: {reason}") from error


def write_trace(path: Path, header: TraceHeader, rows: Iterable[TraceRow]) -> int:
    """Write all rows and return how many.

    What rows raise passes through; the file appears only when it is whole.
    """
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with closing(TraceWriter(path, header, file=unfinished)) as writer:
            for row in rows:
                writer.write(row)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return writer.num_rows


def _fields(row: TraceRow) -> dict[str, object]:
    fields: dict[str, object] = {"timestamp": _ms(row.arrival_s)}
    fields.update((name, getattr(row, name)) for name in _ALWAYS)
    fields.update((name, value) for name in _OPTIONAL if (value := getattr(row, name)) is not None)
    if row.delay_s is not None:
        fields["delay_ms"] = _ms(row.delay_s)
    if row.priority:
        fields["priority"] = row.priority
    if row.hash_ids is None:
        del fields["hash_ids"]
    return fields


def _ms(seconds: float) -> int | float:
    """Return milliseconds, as a whole number where they are one."""
    ms = round(seconds * NUM_MS_PER_S, _MS_DIGITS)
    return int(ms) if ms.is_integer() else ms
