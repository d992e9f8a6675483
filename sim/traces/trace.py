"""A trace as a program reads it: a header and rows, streamed as often as wanted.

It does not know what any format looks like: sim/traces/registry.py lists those.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sim.traces.format import Format, Stated
from sim.traces.registry import guess_format, named_format
from sim.traces.row import Lengths, Tail, TraceHeader, TraceRow
from sim.traces.source import TraceSource
from sim.traces.validation import RowValidator

if TYPE_CHECKING:
    from engine.frontend.prompt import PromptEncoder


class Trace:
    """A recorded sequence of requests, in order of arrival.

    `notes` says in sentences what was inferred about the file, for the user to see.
    """

    def __init__(self, source: TraceSource, format: Format, stated: Stated) -> None:
        """Read what the file says about itself; TraceError when that is not enough."""
        self._source = source
        self._stated = stated
        self._format = format
        described = format.describe(source, stated)
        self.header: TraceHeader = described.header
        self.notes: tuple[str, ...] = described.notes

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._source.path

    @property
    def format_name(self) -> str:
        """The name of its format, as `--format` takes it."""
        return self._format.name

    def rows(self) -> Iterator[TraceRow]:
        """Read the file from its start; each call begins anew.

        Holds one row at a time and one number per distinct block (formats that are not in order
        of arrival hold all rows). Raises TraceError with the line of the first row that is wrong.
        """
        rows = self._format.read(self._source, self.header, self._stated)
        return RowValidator(self._source, self.header).check(rows)


def open_trace(
    path: Path,
    *,
    format: str | None = None,
    block_size: int | None = None,
    tail: Tail | None = None,
    lengths: Lengths | None = None,
    session_gap_s: float | None = None,
    prompts: PromptEncoder | None = None,
) -> Trace:
    """Open a trace; without `format`, guess it from the first line and note the guess.

    `block_size`, `tail` and `lengths` speak for a file that does not say them itself; they must
    not contradict one that does. `session_gap_s` spreads conversations that have no common clock,
    `prompts` tokenizes a log of request bodies. Raises TraceError when the format is unknown or the
    block size cannot be told.
    """
    source = TraceSource(path)
    chosen = guess_format(source) if format is None else named_format(source, format)
    stated = Stated(
        block_size=block_size,
        tail=tail,
        lengths=lengths,
        session_gap_s=session_gap_s,
        prompts=prompts,
    )
    trace = Trace(source, chosen, stated)
    if format is None and chosen.name != "kvtrace":
        trace.notes = (f"format {chosen.name}, guessed from the first line", *trace.notes)
    return trace
