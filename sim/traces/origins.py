"""Where the hits of an infinite cache come from: what all share, what goes on, what branches.

Without session ids the kinds are told from the chains alone; the kinds add up to all hits.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from sim.traces.row import TraceRow

# A block is hot when this many requests hold it, or this share of them, whichever is more.
MIN_HOT_REQUESTS = 20
MIN_HOT_SHARE = 0.005


class HitOrigins(msgspec.Struct, frozen=True, kw_only=True):
    """Hit blocks by kind.

    `hot`: in many requests, such as a system prompt. `continued`: part of an earlier prompt that
    this one repeats to its last full block. `branching`: all others. `continuing_requests` counts
    requests that repeat an earlier prompt whole.
    """

    hot_blocks: int
    hot: int
    continued: int
    branching: int
    continuing_requests: int


class OriginReader:
    """Divides the hits of rows, taken one by one; memory per distinct block.

    `references` counts each block over all rows: what is hot shows only at the end of a trace.
    """

    def __init__(self, *, block_size: int, references: Counter[int], num_rows: int) -> None:
        threshold = max(MIN_HOT_REQUESTS, MIN_HOT_SHARE * num_rows)
        self._block_size = block_size
        self._hot = {block for block, count in references.items() if count >= threshold}
        self._last_full_blocks: set[int] = set()
        self._seen: set[int] = set()
        self._num_hits = self._num_hot = self._num_continued = self._num_continuing = 0

    def add(self, row: TraceRow) -> None:
        """Take the next row; O(blocks)."""
        ids = row.hash_ids or ()
        hits = ids[: sum(map(self._seen.__contains__, ids))]
        num_hot = sum(map(self._hot.__contains__, hits))
        end = _end_of_earlier_prompt(hits, self._last_full_blocks)
        self._num_hits += len(hits)
        self._num_hot += num_hot
        # Hot blocks come first in every chain: a prompt that is hot to its end continues none.
        if end > num_hot:
            self._num_continuing += 1
            self._num_continued += end - num_hot
        self._seen.update(ids)
        if num_full := min(row.input_length // self._block_size, len(ids)):
            self._last_full_blocks.add(ids[num_full - 1])

    def origins(self) -> HitOrigins:
        """Return the division of all hits so far."""
        return HitOrigins(
            hot_blocks=len(self._hot),
            hot=self._num_hot,
            continued=self._num_continued,
            branching=self._num_hits - self._num_hot - self._num_continued,
            continuing_requests=self._num_continuing,
        )


def _end_of_earlier_prompt(hits: tuple[int, ...], last_full_blocks: set[int]) -> int:
    """Return how many of the hits the longest earlier prompt among them covers."""
    for depth in range(len(hits), 0, -1):
        if hits[depth - 1] in last_full_blocks:
            return depth
    return 0
