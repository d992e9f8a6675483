"""What this gateway has had computed where: a guess at what is cached while nobody can tell.

It serves targets in FALLBACK only: engines that publish no events, and all of them while the index
is away. It is bounded, forgets with time, and is dropped with the process that it is about. Pure;
the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvindex.index import Target

MAX_BLOCKS = 50_000
TTL_S = 300.0


class OwnHistory:
    """The newest blocks of each target, at most `max_blocks` and for `ttl_s` seconds."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS, ttl_s: float = TTL_S) -> None:
        self._max_blocks = max_blocks
        self._ttl_s = ttl_s
        self._blocks: dict[Target, OrderedDict[bytes, float]] = {}

    def note(self, target: Target, hashes: Sequence[bytes], now: float) -> None:
        """Remember that a target has just computed a chain; O(len(hashes))."""
        blocks = self._blocks.setdefault(target, OrderedDict())
        # The head last, so that a chain is forgotten from its end, as an engine evicts it.
        for block_hash in reversed(hashes):
            blocks[block_hash] = now
            blocks.move_to_end(block_hash)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def matched_blocks(self, target: Target, hashes: Sequence[bytes], now: float) -> int:
        """Return how many leading blocks of a chain a target may still hold; O(result)."""
        blocks = self._blocks.get(target)
        if not blocks:
            return 0
        oldest = now - self._ttl_s
        for i, block_hash in enumerate(hashes):
            noted_at = blocks.get(block_hash)
            if noted_at is None or noted_at < oldest:
                return i
        return len(hashes)

    def forget(self, replica: str) -> None:
        """Drop what is remembered of a replica: it went away, or its cache was reset."""
        for target in [target for target in self._blocks if target.replica == replica]:
            del self._blocks[target]
