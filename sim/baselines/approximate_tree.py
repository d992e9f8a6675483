"""What an approximate router believes about caches: the prefixes that it has sent where.

A radix tree by another name: a chained hash stands for its whole prefix, so a table from hash to
workers is the tree. It never hears what an engine has evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class ApproximateTree:
    """Blocks by worker, at most `max_blocks` each, least recently sent ones forgotten first.

    None never forgets. Within a prefix the deepest block is forgotten first, as a tree drops its
    leaves.
    """

    def __init__(self, *, max_blocks: int | None) -> None:
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def num_matched(self, worker: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks were sent to a worker, as far as remembered."""
        held = self._held.get(worker)
        if not held:
            return 0
        return next((i for i, block in enumerate(hashes) if block not in held), len(hashes))

    def insert(self, worker: str, hashes: Sequence[bytes]) -> None:
        """Remember a prompt as sent to a worker."""
        held = self._held.setdefault(worker, OrderedDict())
        for block in reversed(hashes):
            held[block] = None
            held.move_to_end(block)
        if self._max_blocks is not None:
            while len(held) > self._max_blocks:
                held.popitem(last=False)
