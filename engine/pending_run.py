"""Blocks that a step in flight completes: what is committed once the step has returned.

By then some of them may have been given back and hold something else. It knows no pool and no
requests; when a step returns is known to kv_cache_manager.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from engine.block import Block
from kvindex.hashing import BlockHash


class PendingRun(NamedTuple):
    """Blocks under consecutive hashes, one each; of several units, a block is listed for each.

    `generations` are those of the blocks when they were listed. Null blocks hold nothing.
    `parent_hash` is the hash of the unit before the first; None means that there is none.
    """

    blocks: Sequence[Block]
    generations: Sequence[int]
    hashes: Sequence[BlockHash]
    parent_hash: BlockHash | None
    lora_name: str | None

    def held_parts(self) -> Iterator[PendingRun]:
        """Return the runs that are left without the blocks that were given back since."""
        is_held = [
            block.block_id != 0 and block.generation == generation
            for block, generation in zip(self.blocks, self.generations, strict=True)
        ]
        if all(is_held):
            yield self
            return
        for held, places in groupby(range(len(is_held)), key=is_held.__getitem__):
            if not held:
                continue
            first, *others = places
            part = slice(first, first + 1 + len(others))
            yield PendingRun(
                self.blocks[part],
                self.generations[part],
                self.hashes[part],
                self.hashes[first - 1] if first else self.parent_hash,
                self.lora_name,
            )
