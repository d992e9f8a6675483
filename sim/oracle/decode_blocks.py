"""The infinite cache of an engine that also keeps the blocks which its answers fill.

The next prompt of a conversation repeats the answer, so such an engine can exceed every bound on
prompts. A trace seldom names those blocks; where it does not, they are read off the session's
next prompt: if that begins with all full blocks of this prompt, then what it has up to the end of
this answer was written while answering. That takes answers to be repeated word for word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.oracle.bounds import CacheHits, infinite_cache
from sim.oracle.reuse import Reuse
from sim.traces.row import TraceRow


@dataclass(frozen=True, slots=True)
class _Turn:
    """A session's latest request: its full blocks, and how many there are with the answer."""

    full_blocks: tuple[int, ...]
    num_blocks_with_output: int


class OutputReader:
    """Takes rows one by one; memory per distinct block and per session."""

    def __init__(self, *, block_size: int) -> None:
        self._reuse = Reuse(block_size)
        self._seen: set[int] = set()
        self._turns: dict[str, _Turn] = {}

    def add(self, row: TraceRow) -> None:
        """Take the next row; O(blocks)."""
        ids = row.hash_ids or ()
        reuse, seen = self._reuse, self._seen
        if row.session_id is not None:
            seen.update(_answered(self._turns.get(row.session_id), ids))
            self._turns[row.session_id] = _turn(row, ids, reuse.block_size)
        reuse.input_lengths.append(row.input_length)
        reuse.num_blocks.append(len(ids))
        # Whatever is seen is seen with all before it, so these are the prompt's first blocks.
        reuse.num_hit_blocks.append(sum(map(seen.__contains__, ids)))
        seen.update(ids)
        seen.update(row.output_hash_ids or ())

    def bound(self) -> CacheHits:
        """Return the bound over the rows so far."""
        return infinite_cache(self._reuse)


def infinite_cache_with_outputs(rows: Iterable[TraceRow], *, block_size: int) -> CacheHits:
    """Return the bound; O(references).

    Without sessions and output_hash_ids it equals the bound on prompts.
    """
    reader = OutputReader(block_size=block_size)
    for row in rows:
        reader.add(row)
    return reader.bound()


def _turn(row: TraceRow, ids: tuple[int, ...], block_size: int) -> _Turn:
    num_full = row.input_length // block_size
    return _Turn(ids[:num_full], (row.input_length + row.output_length) // block_size)


def _answered(before: _Turn | None, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of a prompt that the answer to the turn before it filled."""
    if before is None:
        return ()
    num_full = len(before.full_blocks)
    if ids[:num_full] != before.full_blocks:
        return ()
    return ids[num_full : before.num_blocks_with_output]
