"""What a format is to the rest: how its files are recognised, what their header says, their rows.

One module per format builds one `Format`; sim/traces/registry.py lists them. What every format
has in common, validation above all, is done after it (sim/traces/validation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sim.traces.errors import TraceError
from sim.traces.row import Lengths, Tail, TraceHeader, TraceRow
from sim.traces.source import TraceSource

if TYPE_CHECKING:
    from engine.frontend.prompt import PromptEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What the caller says about a file that does not say it itself; None is "not said".

    `session_gap_s` is the mean time between the starts of conversations without a common clock.
    """

    block_size: int | None = None
    tail: Tail | None = None
    lengths: Lengths | None = None
    session_gap_s: float | None = None
    prompts: PromptEncoder | None = None


@dataclass(frozen=True, slots=True)
class Described:
    """A file's header, and in sentences what of it was inferred."""

    header: TraceHeader
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write a trace.

    `recognises` judges a file by its first line. `describe` may read further lines. `read` yields
    rows in seconds, in the file's order unless that is not the order of arrival, with ids that
    are global; it raises TraceError with the line that it cannot read.
    """

    name: str
    recognises: Callable[[bytes], bool]
    describe: Callable[[TraceSource, Stated], Described]
    read: Callable[[TraceSource, TraceHeader, Stated], Iterator[TraceRow]]


class ChainIds:
    """Small integers for chains, numbered as they are met.

    `extend` names each block by its own key and by all blocks before it, so keys need only tell
    blocks of one parent apart: this makes content hashes, or ids of a local scope, into global
    ids that stand for a whole prefix.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[object, object], int] = {}

    def extend(self, root: object, keys: list[object] | tuple[object, ...]) -> tuple[int, ...]:
        """Return one id per key; chains of different roots share nothing."""
        parent: object = ("root", root)
        ids = []
        for key in keys:
            parent = self._ids.setdefault((parent, key), len(self._ids))
            ids.append(parent)
        return tuple(ids)


class LogClock:
    """Times of arrival in a log whose rows all have a time or all have none; the first is 0 s."""

    NO_TIMES = "no times: every request arrives at 0 s, only the order means something"

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._zero_s: float | None = None

    def arrival_s(self, line: int, timestamp: float | None) -> float:
        """Return when a row arrives; TraceError when it has no time and those before have."""
        if self._zero_s is None:
            self._zero_s = timestamp
        if self._zero_s is None:
            return 0.0
        if timestamp is None:
            raise self._source.error(line, "some rows have a timestamp and some have none")
        return timestamp - self._zero_s


def json_keys(line: bytes) -> frozenset[str]:
    """Return the field names of a JSON object, nothing for any other line."""
    try:
        return frozenset(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return frozenset()


def require_block_size(source: TraceSource, stated: Stated, *, why: str) -> int:
    """Return the stated block size; TraceError when there is none."""
    if stated.block_size is None:
        raise TraceError(source.path, f"block size unknown: {why}; state it with --block-size N")
    return stated.block_size


def require_agreement(source: TraceSource, stated: Stated, header: TraceHeader) -> None:
    """Raise TraceError when the caller states something else than the file does."""
    for field in ("block_size", "tail", "lengths"):
        said, written = getattr(stated, field), getattr(header, field)
        if said is not None and said != written:
            flag = f"--{field.replace('_', '-')}"
            raise TraceError(
                source.path, f"the file says {field} {written}, {flag} says {said}; leave it out"
            )
