"""The pool of KV-cache blocks: allocation, prefix cache and eviction in one free queue.

A cached block keeps its hash while it is free, so eviction is nothing but being reused. Within a
chain a child is always reused before its parent: the set of cached hashes is prefix-closed (in
groups that hold whole chains), and the index's sub-linear match relies on it. It knows neither
requests nor what a cache group reads; it is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.block import Block, FreeQueue
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvindex.hashing import BlockHash

NULL_BLOCK_ID = 0


class BlockPool:
    """`num_blocks` blocks, of which block 0 is the null block and is never handed out.

    `block_size` is the number of tokens of a hash unit. All cache groups share the blocks; a hash
    means something only together with its group. Events are collected in order and taken by the
    engine core after each step: the first copy of a hash in a group emits BlockStored, the last
    one to go emits BlockRemoved.
    """

    def __init__(self, num_blocks: int, *, block_size: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block): {num_blocks}"
            )
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_cnt = 1
        self.free_queue = FreeQueue(self.blocks[1:])
        self.num_evictions = 0
        self._copies: list[dict[BlockHash, list[Block]]] = [{} for _ in range(num_groups)]
        self._events: list[KVEvent] = []

    @property
    def null_block(self) -> Block:
        """The block that stands where a table needs none; its contents mean nothing."""
        return self.blocks[NULL_BLOCK_ID]

    @property
    def num_groups(self) -> int:
        """Cache groups that share this pool."""
        return len(self._copies)

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
        """Distinct (group, hash) keys that a look-up can find."""
        return sum(map(len, self._copies))

    def cached_hashes(self, group: int = 0) -> Iterable[BlockHash]:
        """List every hash that a look-up in a group can find, in no particular order."""
        return self._copies[group].keys()

    def cached_keys(self) -> Iterator[tuple[int, BlockHash]]:
        """List every (group, hash) that a look-up can find, in no particular order."""
        for group, copies in enumerate(self._copies):
            for block_hash in copies:
                yield group, block_hash

    def copies(self, block_hash: BlockHash, group: int = 0) -> Sequence[Block]:
        """Return every block of a group that holds the hash."""
        return self._copies[group].get(block_hash, ())

    def get_cached(self, block_hash: BlockHash, group: int = 0) -> Block | None:
        """Return a block that holds the hash, one in use if there is one; O(copies)."""
        copies = self._copies[group].get(block_hash)
        return _preferred(copies) if copies is not None else None

    def get_leading(self, hashes: Iterable[BlockHash], group: int = 0) -> list[Block]:
        """Return blocks that hold the hashes, in order, up to the first that nobody holds."""
        get = self._copies[group].get
        found: list[Block] = []
        for block_hash in hashes:
            copies = get(block_hash)
            if copies is None:
                break
            found.append(copies[0] if len(copies) == 1 else _preferred(copies))
        return found

    def allocate(self, count: int, group: int = 0) -> list[Block]:
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
            block.group = group
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a user to each block; a free one leaves the queue and keeps its contents.

        The null block has no users to count.
        """
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            if block.block_id != NULL_BLOCK_ID:
                block.ref_cnt += 1

    def refresh(self, block: Block) -> None:
        """Let a free block that was just read be reused last; one in use stays as it is.

        NOTE: its parents must be in use or be given back later, else they would go before it.
        """
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
            self.free_queue.append(block)

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

        Called after the step that wrote the last slot has returned. `parent_hash` is the hash of
        the unit before; None means that there is none. A block of several units is committed unit
        by unit.
        """
        assert block.ref_cnt > 0, f"{block} is committed but nobody holds it"
        if block.block_hash is None:
            block.parent_hash = parent_hash
        else:
            assert block.block_hash == parent_hash, f"{block} is committed twice"
            block.inner_hashes = [*(block.inner_hashes or ()), block.block_hash]
        block.block_hash = block_hash
        copies = self._copies[block.group].setdefault(block_hash, [])
        copies.append(block)
        if len(copies) == 1:
            self._emit_stored(block.group, block_hash, parent_hash)

    def reset(self) -> bool:
        """Forget every hash; False, with nothing changed, while any block is in use."""
        if self.num_free != self.num_usable:
            return False
        for block in self.blocks:
            block.block_hash = block.parent_hash = block.inner_hashes = None
        for copies in self._copies:
            copies.clear()
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
        children, perhaps), so one of the two loses its hash and the other takes the later place;
        a copy that reaches further into its block is the one that stays.
        """
        if block.block_hash is None:
            self.free_queue.prepend(block)
            return
        copies = self._copies[block.group][block.block_hash]
        if len(copies) == 1:
            self.free_queue.append(block)
            return
        other = _preferred([copy for copy in copies if copy is not block])
        if other.ref_cnt:
            self._forget(block)
            self.free_queue.prepend(block)
            return
        self.free_queue.remove(other)
        kept, dropped = (block, other) if other.block_hash == block.block_hash else (other, block)
        self._forget(dropped)
        self.free_queue.prepend(dropped)
        self.free_queue.append(kept)

    def _forget(self, block: Block) -> None:
        """Drop every hash of a block, deepest first."""
        block_hash = block.block_hash
        assert block_hash is not None
        self._forget_hash(block, block_hash)
        for inner in reversed(block.inner_hashes or ()):
            self._forget_hash(block, inner)
        block.block_hash = block.parent_hash = block.inner_hashes = None

    def _forget_hash(self, block: Block, block_hash: BlockHash) -> None:
        copies = self._copies[block.group][block_hash]
        copies.remove(block)
        if not copies:
            del self._copies[block.group][block_hash]
            self._emit_removed(block.group, block_hash)

    def _emit_stored(
        self, group: int, block_hash: BlockHash, parent_hash: BlockHash | None
    ) -> None:
        """Record a new hash, joined to the run before it when it continues that run."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and last.block_hashes[-1] == parent_hash
            and last.group_idx == group
        ):
            last.block_hashes.append(block_hash)
            return
        self._events.append(
            BlockStored(
                block_hashes=[block_hash],
                parent_block_hash=parent_hash,
                token_ids=[],
                block_size=self.block_size,
                group_idx=group,
            )
        )

    def _emit_removed(self, group: int, block_hash: BlockHash) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(block_hash)
            return
        self._events.append(BlockRemoved(block_hashes=[block_hash], group_idx=group))


def _preferred(copies: Sequence[Block]) -> Block:
    """Return a copy in use if there is one; O(copies)."""
    return next((block for block in copies if block.ref_cnt), copies[0])
