"""A replica without a clock: the engine's real block pool, every request computed at once.

It is what `order` mode drives. Who is sent here, and when, is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from kvindex.events import KVEvent
from kvindex.hashing import BlockHash


class CacheReplica:
    """One pool of `num_blocks` usable blocks."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks + 1, block_size=block_size)

    def serve(self, hashes: Sequence[BlockHash], *, num_prompt_tokens: int) -> int:
        """Compute a prompt and keep its full blocks; return how many were cached before.

        The last token is always computed, so a wholly cached prompt still misses its last block
        when it ends there. Of a prompt larger than the pool the leading part is kept.
        """
        pool = self.pool
        usable = min(len(hashes), (num_prompt_tokens - 1) // pool.block_size)
        blocks = pool.map.get_leading(hashes[:usable], 0)
        num_hits = len(blocks)
        pool.touch(blocks)
        new = pool.allocate(min(len(hashes) - num_hits, pool.num_free))
        if new:
            parent = hashes[num_hits - 1] if num_hits else None
            pool.commit_run(new, hashes[num_hits : num_hits + len(new)], parent)
        blocks += new
        blocks.reverse()
        pool.free(blocks)
        return num_hits

    def take_events(self) -> list[KVEvent]:
        """Return what changed since the last call."""
        return self.pool.take_events()
