"""The second tier: whole blocks in host memory that the pool has evicted.

It decides what is kept there and which contents go first; the bytes are moved by the executor
(transfer.py). It knows neither requests nor whether restoring is worth it (restore_cost.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.block import Block, FreeQueue
from engine.block_map import BlockMap
from engine.event_log import EventLog
from engine.transfer import HostLoad, HostStore
from kvindex.events import MEDIUM_OF_TIER


class HostTier:
    """`num_blocks` blocks, reused least recently stored or read first.

    `num_stored` and `num_loaded` count blocks moved here and back. NOTE: pool and tier together
    are prefix-closed, in groups that hold whole chains. The pool evicts a child before its parent,
    and what it evicts stands last here, whether it comes or was here already; so a block either
    has its parent in the pool, or stands before it.
    """

    def __init__(self, num_blocks: int, *, log: EventLog, num_groups: int) -> None:
        self.blocks = [Block(i, on_host=True) for i in range(num_blocks)]
        self.map = BlockMap(log, medium=MEDIUM_OF_TIER["host"], num_groups=num_groups)
        self.reuse_order = FreeQueue(self.blocks)
        self.num_stored = 0
        self.num_loaded = 0

    def store(self, block: Block) -> HostStore | None:
        """Take in a cached block that the pool is about to reuse; return the transfer for it.

        None when its contents are here already, or when every block is pinned.
        """
        assert block.block_hash is not None
        known = self.map.get(block.block_hash, block.group)
        if known is not None:
            self.pin([known])
            self.unpin([known])
            return None
        if not self.reuse_order:
            # NOTE: then all that is here belongs to one hit, which has no child of this block.
            return None
        own = self.reuse_order.popleft()
        if own.block_hash is not None:
            self.map.forget((own,))
        own.group = block.group
        self.map.add_all(own, block)
        self.reuse_order.append(own)
        self.num_stored += 1
        return HostStore(block.block_id, own.block_id)

    def load(self, block: Block, destination: Block) -> HostLoad:
        """Return the transfer that brings a pinned block back to the pool."""
        assert block.ref_cnt > 0, f"{block} may be overwritten before it is loaded"
        self.num_loaded += 1
        return HostLoad(block.block_id, destination.block_id)

    def pin(self, blocks: Iterable[Block]) -> None:
        """Keep the contents of blocks until they are unpinned."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.reuse_order.remove(block)
            block.ref_cnt += 1

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Let blocks go that were read, deepest block of the chain first."""
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.reuse_order.append(block)

    def clear(self) -> None:
        """Forget every hash, without an event; nothing may be pinned."""
        self.map.clear()
        for block in self.blocks:
            block.forget_hashes()
