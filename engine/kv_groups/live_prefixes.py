"""Where the prompts of live requests part: a state that is kept there serves all but the first.

Blocks are counted by their hashes, over requests that wait and that run. It knows neither tokens
nor what is cached.
"""

from __future__ import annotations

from collections import Counter

from engine.request import Request
from kvindex.hashing import BlockHash


class LivePrefixes:
    """How many live requests begin with which blocks; `is_kept` False counts nothing."""

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._counts: Counter[BlockHash] = Counter()
        self._num_counted: dict[str, int] = {}

    def add(self, request: Request) -> None:
        """Count the blocks that a new request is known to have; O(blocks)."""
        if self._is_kept:
            self._counts.update(request.chain.hashes)
            self._num_counted[request.request_id] = len(request.chain.hashes)

    def remove(self, request: Request) -> None:
        """Count a request no more."""
        num_counted = self._num_counted.pop(request.request_id, 0)
        counts = self._counts
        for block_hash in request.chain.hashes[:num_counted]:
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]

    def partings(self, request: Request, start: int, num_tokens: int) -> set[int]:
        """Return after how many tokens others leave a request's chain: the last such place.

        Looked for behind the first `start` blocks, among the first `num_tokens` tokens; empty when
        there is none. O(blocks between them).
        """
        hashes, size = request.chain.hashes, request.chain.block_size
        last = min(num_tokens // size, self._num_counted.get(request.request_id, 0) - 1)
        for end in range(last, start, -1):
            if self._counts[hashes[end - 1]] > self._counts[hashes[end]]:
                return {end * size}
        return set()
