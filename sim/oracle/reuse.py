"""Who computed what before: the structure of reuse in a trace, and all that bounds need of it.

Ids stand for whole prefixes, so the blocks of a prompt that were seen before are its first ones,
and they fall into a few runs: consecutive blocks that were last used by the same earlier request,
later requests first. Every bound here is a computation on runs, so it costs per run, not per
block. It knows no cache and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.traces.row import TraceRow

Namespace = Callable[[TraceRow], Hashable]
"""Which cache a request may share: requests of different namespaces never hit each other."""


class Run(NamedTuple):
    """Consecutive blocks of a prompt whose last use before it was in row `owner` (from 0)."""

    owner: int
    num_blocks: int


@dataclass(slots=True)
class Reuse:
    """The rows of a trace, column by column; `runs[i]` covers the reused blocks of row i."""

    block_size: int
    arrivals_s: list[float] = field(default_factory=list)
    input_lengths: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    num_hit_blocks: list[int] = field(default_factory=list)
    runs: list[tuple[Run, ...]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """How many requests there are."""
        return len(self.runs)

    @property
    def num_references(self) -> int:
        """How many blocks all prompts have together."""
        return sum(self.num_blocks)

    @property
    def num_unique_blocks(self) -> int:
        """How many different blocks there are; of two namespaces never the same."""
        return self.num_references - sum(self.num_hit_blocks)


class ReuseReader:
    """Builds a Reuse row by row; memory per row and per distinct block of each namespace."""

    def __init__(self, *, block_size: int, namespace: Namespace | None = None) -> None:
        self.reuse = Reuse(block_size)
        self._namespace = namespace
        self._owners: dict[Hashable, dict[int, int | None]] = {}

    def add(self, row: TraceRow) -> int:
        """Take the next row and return how many of its blocks were seen before; O(blocks)."""
        reuse = self.reuse
        name = None if self._namespace is None else self._namespace(row)
        owners = self._owners.setdefault(name, {})
        ids = row.hash_ids or ()
        runs = _runs(list(map(owners.get, ids)))
        owners.update(dict.fromkeys(ids, reuse.num_rows))
        num_hits = sum(run.num_blocks for run in runs)
        reuse.arrivals_s.append(row.arrival_s)
        reuse.input_lengths.append(row.input_length)
        reuse.num_blocks.append(len(ids))
        reuse.num_hit_blocks.append(num_hits)
        reuse.runs.append(runs)
        return num_hits


def reuse_of(
    rows: Iterable[TraceRow], *, block_size: int, namespace: Namespace | None = None
) -> Reuse:
    """Read a trace once; O(references).

    Rows without hash_ids count as prompts without a block: they hit nothing.
    """
    reader = ReuseReader(block_size=block_size, namespace=namespace)
    for row in rows:
        reader.add(row)
    return reader.reuse


def _runs(last_uses: list[int | None]) -> tuple[Run, ...]:
    """Group the last use of each block; None, never used before, holds from some block on."""
    runs = []
    start = 0
    while start < len(last_uses):
        owner = last_uses[start]
        if owner is None:
            break
        # A prefix is used whenever a longer one is, so owners only get older with depth.
        num_blocks = last_uses.count(owner)
        runs.append(Run(owner, num_blocks))
        start += num_blocks
    return tuple(runs)
