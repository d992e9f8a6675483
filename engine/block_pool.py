"""The pool of KV-cache blocks: allocation, prefix cache and eviction in one free queue.

A cached block keeps its hash while it is free, so eviction is nothing but being reused. Within a
chain a child is always reused before its parent: the set of cached hashes is prefix-closed, and
the index's sub-linear match relies on it. It knows no requests; it is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.block import Block, FreeQueue
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvindex.hashing import BlockHash


class BlockPool:
    """`num_blocks` blocks, of which block 0 is the null block and is never handed out.

    Events are collected in order and taken by the engine core after each step: the first copy of
    a hash emits BlockStored, the last one to go emits BlockRemoved.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block): {num_blocks}"
            )
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blocks[0].ref_cnt = 1
        self.free_queue = FreeQueue(self.blocks[1:])
        self.num_evictions = 0
        self._copies: dict[BlockHash, list[Block]] = {}
        self._events: list[KVEvent] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self.free_queue)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self.blocks) - 1

    @property
    def num_cached_hashes(self) -> int:
        """Distinct hashes that a look-up can find."""
        return len(self._copies)

    def cached_hashes(self) -> Iterable[BlockHash]:
        """List every hash that a look-up can find, in no particular order."""
        return self._copies.keys()

    def copies(self, block_hash: BlockHash) -> Sequence[Block]:
        """Return every block that holds the hash."""
        return self._copies.get(block_hash, ())

    def get_cached(self, block_hash: BlockHash) -> Block | None:
        """Return a block that holds the hash, one in use if there is one; O(copies)."""
        copies = self._copies.get(block_hash)
        if copies is None:
            return None
        if len(copies) == 1:
            return copies[0]
        return next((block for block in copies if block.ref_cnt), copies[0])

    def allocate(self, count: int) -> list[Block]:
        """Hand out `count` blocks, evicting what they held; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        taken = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                self.num_evictions += 1
                self._forget(block)
            block.ref_cnt = 1
            block.generation += 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a user to each block; a free one leaves the queue and keeps its contents."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Give one use of each block back, deepest block of the chain first.

        NOTE: the order is the caller's duty, because eviction follows it.
        """
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                block.generation += 1
                self._enqueue(block)

    def commit(self, block: Block, block_hash: BlockHash, parent_hash: BlockHash | None) -> None:
        """Make the contents of a block in use findable under its hash.

        Called after the step that wrote the last slot has returned. `parent_hash` None means that
        the block is the first of its chain.
        """
        assert block.ref_cnt > 0, f"{block} is committed but nobody holds it"
        assert block.block_hash is None, f"{block} is committed twice"
        block.block_hash, block.parent_hash = block_hash, parent_hash
        copies = self._copies.setdefault(block_hash, [])
        copies.append(block)
        if len(copies) == 1:
            self._emit_stored(block_hash, parent_hash)

    def reset(self) -> bool:
        """Forget every hash; False, with nothing changed, while any block is in use."""
        if self.num_free != self.num_usable:
            return False
        for copies in self._copies.values():
            for block in copies:
                block.block_hash = block.parent_hash = None
        self._copies.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVEvent]:
        """Return what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _enqueue(self, block: Block) -> None:
        """Queue a block that nobody uses any more: contents that matter are reused last.

        One copy of a hash is enough. While another copy is in use, this one goes first, without
        its hash. If the other one is free too, that one stands too far in front (before its own
        children, perhaps), so it loses its hash and this one takes the later place.
        """
        if block.block_hash is None:
            self.free_queue.prepend(block)
            return
        other = next((c for c in self._copies[block.block_hash] if c is not block), None)
        if other is None:
            self.free_queue.append(block)
        elif other.ref_cnt:
            self._forget(block)
            self.free_queue.prepend(block)
        else:
            self._forget(other)
            self.free_queue.remove(other)
            self.free_queue.prepend(other)
            self.free_queue.append(block)

    def _forget(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        copies = self._copies[block_hash]
        copies.remove(block)
        block.block_hash = block.parent_hash = None
        if not copies:
            del self._copies[block_hash]
            self._emit_removed(block_hash)

    def _emit_stored(self, block_hash: BlockHash, parent_hash: BlockHash | None) -> None:
        """Record a new hash, joined to the run before it when it continues that run."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent_hash:
            last.block_hashes.append(block_hash)
            return
        self._events.append(
            BlockStored(
                block_hashes=[block_hash],
                parent_block_hash=parent_hash,
                token_ids=[],
                block_size=self.block_size,
                group_idx=0,
            )
        )

    def _emit_removed(self, block_hash: BlockHash) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
            return
        self._events.append(BlockRemoved(block_hashes=[block_hash], group_idx=0))
