"""Where blocks of a foreign engine lie in the pool's own hash chain.

A foreign engine hashes as it likes, in blocks of its own size; from the tokens of its blocks the
pool's hashes are computed anew. It knows no events and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvindex.foreign_keys import BlockKeys
from kvindex.hashing import BlockHash, HashScheme, extra_keys, hash_block, root_hash


@dataclass(slots=True)
class ChainPosition:
    """Where the pool's chain stands behind a foreign block.

    `parent` is the hash of the last full pool block, None before the first; `rest` are the tokens
    since, fewer than a pool block holds. `salt` waits for the first pool block to be full.
    """

    parent: BlockHash | None = None
    rest: tuple[int, ...] = ()
    salt: str | None = None


class PoolChain:
    """The pool's way of hashing, applied to tokens as they come."""

    def __init__(self, scheme: HashScheme) -> None:
        self.block_size = scheme.block_size
        self._algorithm = scheme.algorithm
        self._root = root_hash(scheme)

    def extend(
        self, start: ChainPosition, tokens: Sequence[int], keys: BlockKeys
    ) -> tuple[ChainPosition, tuple[BlockHash, ...]]:
        """Return where the chain stands behind these tokens, and the blocks that became full.

        Raises ValueError for tokens that are none.
        """
        size, waiting = self.block_size, (*start.rest, *tokens)
        parent, hashes = start.parent, []
        num_full = len(waiting) // size
        for first in range(0, num_full * size, size):
            extra = extra_keys(
                first_block=parent is None, cache_salt=start.salt, adapter=keys.adapter
            )
            above = self._root if parent is None else parent
            parent = hash_block(self._algorithm, above, waiting[first : first + size], extra)
            hashes.append(parent)
        salt = start.salt if parent is None else None
        return ChainPosition(parent, waiting[num_full * size :], salt), tuple(hashes)
