"""The pool of KV-cache blocks: allocation, prefix cache and eviction in one free queue.

A cached block keeps its hash while it is free, so eviction is nothing but being reused. Within a
chain a child is always reused before its parent: the set of cached hashes is prefix-closed (in
groups that hold whole chains), and the index's sub-linear match relies on it. It knows neither
requests nor what a cache group reads; it is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from engine.block import Block
from engine.block_map import BlockMap, preferred
from engine.event_log import EventLog
from engine.host_tier import HostTier
from engine.residency import UNWATCHED_BITS, Residency
from engine.segmented_queue import make_queue
from engine.stats import Evictions
from engine.tenant_queue import ReuseQueue, TenantQueue
from engine.transfer import BlockCopy, BlockTransfer
from kvindex.events import MEDIUM_OF_TIER, KVEvent
from kvindex.hashing import BlockHash

NULL_BLOCK_ID = 0


class BlockPool:
    """`num_blocks` blocks, of which block 0 is the null block and is never handed out.

    `block_size` is the number of tokens of a hash unit. All cache groups share the blocks.
    `num_host_blocks` > 0 adds a host tier that takes what is evicted; `shares` are guaranteed
    parts of the pool by tenant (tenant_queue.py); `protected_share` > 0 protects what was hit
    (segmented_queue.py). Events and transfers are collected in order
    until they are taken. The size may shrink and grow again; `num_blocks` is what it is now.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int,
        num_groups: int = 1,
        num_host_blocks: int = 0,
        shares: Mapping[str, float] | None = None,
        protected_share: float = 0.0,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block): {num_blocks}"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_cnt = 1
        self.evictions = Evictions()
        self.residency = Residency()
        self._log = EventLog(block_size=block_size)
        self.map = BlockMap(self._log, medium=MEDIUM_OF_TIER["gpu"], num_groups=num_groups)
        self.host: HostTier | None = None
        if num_host_blocks:
            self.host = HostTier(num_host_blocks, log=self._log, num_groups=num_groups)
        self.tenants: TenantQueue | None = None
        if shares:
            self.tenants = TenantQueue(
                self.blocks[1:],
                shares=shares,
                num_usable=self.num_usable,
                protected_share=protected_share,
            )
        self.free_queue: ReuseQueue = self.tenants or make_queue(
            self.blocks[1:], protected_share=protected_share, num_usable=self.num_usable
        )
        self._transfers: list[BlockTransfer] = []
        self._new_size: int | None = None

    @property
    def has_news(self) -> bool:
        """Whether the executor must be told of moves or of another size."""
        return bool(self._transfers) or self._new_size is not None

    @property
    def null_block(self) -> Block:
        """The block that stands where a table needs none; its contents mean nothing."""
        return self.blocks[NULL_BLOCK_ID]

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self.free_queue)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were handed out again."""
        return self.evictions.total

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_groups(self) -> int:
        """Cache groups that share this pool."""
        return self.map.num_groups

    @property
    def num_cached_hashes(self) -> int:
        """Distinct (group, hash) keys that a look-up can find in the pool."""
        return self.map.num_hashes

    def cached_hashes(self, group: int = 0) -> Iterable[BlockHash]:
        """List every hash that a look-up in a group can find, in no particular order."""
        return self.map.hashes(group)

    def cached_keys(self) -> Iterator[tuple[int, BlockHash]]:
        """List every (group, hash) that a look-up can find, in no particular order."""
        return iter(self.map)

    def copies(self, block_hash: BlockHash, group: int = 0) -> Sequence[Block]:
        """Return every block of a group that holds the hash."""
        return self.map.copies(block_hash, group)

    def get_cached(self, block_hash: BlockHash, group: int = 0) -> Block | None:
        """Return a block that holds the hash, one in use if there is one; O(copies)."""
        return self.map.get(block_hash, group)

    def allocate(self, count: int, group: int = 0, *, tenant: str | None = None) -> list[Block]:
        """Hand out `count` blocks, evicting what they held; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        taken = self.free_queue.take(count, tenant)
        self._evict([block for block in taken if block.block_hash is not None])
        for block in taken:
            block.ref_cnt = 1
            block.generation += 1
            block.group = group
            block.tenant = tenant
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a user to each block; a free one leaves the queue and keeps its contents.

        The null block has no users to count.
        """
        idle = [block for block in blocks if not block.ref_cnt]
        self.free_queue.remove_all(idle)
        for block in [block for block in idle if not block.block_id & UNWATCHED_BITS]:
            self.residency.reused(block.block_id)
        for block in blocks:
            if block.block_id != NULL_BLOCK_ID:
                block.ref_cnt += 1
                block.was_hit = True

    def refresh(self, block: Block) -> None:
        """Let a free block that was just read be reused last; one in use stays as it is.

        Call `settle` when it has been read. NOTE: its parents must be in use or be given back
        later, else they would go before it.
        """
        if block.ref_cnt == 0:
            self.free_queue.postpone(block)

    def settle(self) -> None:
        """Let refreshed blocks be reused in their turn, as the latest ones."""
        if self.tenants is not None:
            self.tenants.settle()

    def free(self, blocks: Sequence[Block]) -> None:
        """Give one use of each block back, deepest block of the chain first.

        NOTE: the order is the caller's duty, because eviction follows it.
        """
        may_have_copies = self.map.has_copies
        idle: list[Block] = []
        for block in blocks:
            block.ref_cnt = num_left = block.ref_cnt - 1
            if num_left:
                assert num_left > 0, f"{block} is freed twice"
                continue
            block.generation += 1
            if not block.block_id & UNWATCHED_BITS:
                self.residency.rested(block.block_id)
            if may_have_copies:
                self._enqueue(block)
            elif block.block_hash is None:
                self.free_queue.prepend(block)
            else:
                idle.append(block)
        self.free_queue.extend(idle)

    def commit(
        self,
        block: Block,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
        *,
        lora_name: str | None = None,
    ) -> None:
        """Make the contents of a block in use findable under its hash, see `commit_run`.

        A block of several units is committed unit by unit.
        """
        self.commit_run((block,), (block_hash,), parent_hash, lora_name=lora_name)

    def commit_run(
        self,
        blocks: Sequence[Block],
        hashes: Sequence[BlockHash],
        parent_hash: BlockHash | None,
        *,
        lora_name: str | None = None,
    ) -> None:
        """Make the contents of blocks in use findable under consecutive hashes, one each.

        Called after the step that wrote the last slot has returned. `parent_hash` is the hash of
        the unit before the first; None means that there is none. `lora_name`: the adapter that
        computed them.
        """
        in_use = all([block.ref_cnt for block in blocks])
        assert in_use, f"one of {blocks} is committed but nobody holds it"
        if self.tenants is None:
            self.map.add(blocks, hashes, parent_hash, lora_name=lora_name)
        else:
            for block, block_hash in zip(blocks, hashes, strict=True):
                self.tenants.own(block, self._owner_of_chain(block, block_hash, parent_hash))
                self.map.add((block,), (block_hash,), parent_hash, lora_name=lora_name)
                parent_hash = block_hash
        for block in [block for block in blocks if not block.block_id & UNWATCHED_BITS]:
            self.residency.committed(block.block_id)

    def discard(self, block: Block) -> None:
        """Forget what a cached block holds, because nobody will want it; a free one goes first."""
        is_free = block.ref_cnt == 0
        if is_free:
            self.free_queue.remove(block)
        self.map.forget((block,))
        self.residency.discarded(block.block_id)
        if is_free:
            self.free_queue.prepend(block)

    def copy(self, source: Block, destination: Block) -> None:
        """Have the executor copy a block of either tier to a block in use of the pool."""
        if source.on_host:
            assert self.host is not None
            self._transfers.append(self.host.load(source, destination))
        elif source is not destination:
            self._transfers.append(BlockCopy(source.block_id, destination.block_id))

    def restore(self, block: Block, *, tenant: str | None = None) -> Block:
        """Bring a pinned block of the host tier back; return the block in use that holds it now.

        It is findable at once. NOTE: transfers and steps are carried out in the order in which
        they were decided, so whoever finds it from here on reads it after it was loaded.
        """
        (own,) = self.allocate(1, block.group, tenant=tenant)
        self.copy(block, own)
        if self.tenants is not None and block.block_hash is not None:
            owner = self._owner_of_chain(own, block.block_hash, block.parent_hash)
            self.tenants.own(own, owner)
        self.map.add_all(own, block)
        own.was_hit = True
        return own

    def shrink(self, num_blocks: int, *, closed_groups: Collection[int]) -> None:
        """Do without the blocks from `num_blocks` on; none of them may be in use.

        What they cache is evicted, in `closed_groups` (which hold whole chains) together with its
        descendants, children first.
        """
        retiring = self.blocks[num_blocks : self.num_blocks]
        assert not any(block.ref_cnt for block in retiring), "a block in use cannot be retired"
        for block in self._with_descendants(num_blocks, closed_groups):
            self.free_queue.remove(block)
            self._evict((block,))
            self.free_queue.prepend(block)
        for block in retiring:
            self.free_queue.remove(block)
        self._set_size(num_blocks)

    def grow(self, num_blocks: int) -> None:
        """Take blocks back into use, up to as many as the pool was made with."""
        for block in reversed(self.blocks[self.num_blocks : num_blocks]):
            self.free_queue.prepend(block)
        self._set_size(num_blocks)

    def reset(self) -> bool:
        """Forget every hash in every tier; False, with nothing changed, while a block is in use."""
        if self.num_free != self.num_usable:
            return False
        self.map.clear()
        self.residency.clear()
        for block in reversed(list(self.free_queue)):
            self.free_queue.remove(block)
            block.forget_hashes()
            self.free_queue.prepend(block)
        if self.host is not None:
            self.host.clear()
        self._log.cleared()
        return True

    def take_events(self) -> list[KVEvent]:
        """Return what changed since the last call, in order, over all tiers."""
        return self._log.take()

    def take_transfers(self) -> list[BlockTransfer]:
        """Return the moves asked for since the last call, in the order to carry them out."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def take_new_size(self) -> int | None:
        """Return the size if it has changed since the last call."""
        size, self._new_size = self._new_size, None
        return size

    def _set_size(self, num_blocks: int) -> None:
        self.num_blocks = self._new_size = num_blocks
        self.free_queue.set_usable(self.num_usable)

    def _evict(self, blocks: Sequence[Block]) -> None:
        """Forget what blocks hold; a last copy goes to the host tier and is announced there first.

        With a host tier, one block after the other: which copy is the last shows only then.
        """
        if not blocks:
            return
        self.evictions.count([block.tenant for block in blocks])
        for block in [block for block in blocks if not block.block_id & UNWATCHED_BITS]:
            self.residency.evicted(block.block_id)
        if self.host is None:
            self.map.forget(blocks)
            return
        for block in blocks:
            self._store(self.host, block)
            self.map.forget((block,))

    def _store(self, host: HostTier, block: Block) -> None:
        """Keep the contents of a block on the host unless the pool has another copy."""
        assert block.block_hash is not None
        if len(self.map.copies(block.block_hash, block.group)) == 1:
            store = host.store(block)
            if store is not None:
                self._transfers.append(store)

    def _with_descendants(self, first_id: int, closed_groups: Collection[int]) -> list[Block]:
        """List the cached free blocks from an id on and all that descend from them, children first.

        The reverse of the reuse order meets parents before children, so one pass finds all.
        NOTE: no descendant is in use, for whoever uses it uses a copy of its parent too.
        """
        found: list[Block] = []
        lost: set[tuple[int, BlockHash]] = set()
        for block in reversed(list(self.free_queue)):
            if block.block_hash is None:
                continue
            is_orphan = block.parent_hash is not None and (block.group, block.parent_hash) in lost
            if block.block_id < first_id and not is_orphan:
                continue
            found.append(block)
            is_last = len(self.map.copies(block.block_hash, block.group)) == 1
            if is_last and block.group in closed_groups:
                lost.add((block.group, block.block_hash))
        return found[::-1]

    def _owner_of_chain(
        self, block: Block, block_hash: BlockHash, parent_hash: BlockHash | None
    ) -> str | None:
        """Return whom the chain belongs to that a block continues, or who asked for the block."""
        for known_hash in (block_hash, parent_hash):
            known = None if known_hash is None else self.map.get(known_hash, block.group)
            if known is not None:
                return known.owner
        return block.owner

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
        copies = self.map.copies(block.block_hash, block.group)
        if len(copies) == 1:
            self.free_queue.append(block)
            return
        other = preferred([copy for copy in copies if copy is not block])
        if other.ref_cnt:
            other.was_hit |= block.was_hit
            self.map.forget((block,))
            self.free_queue.prepend(block)
            return
        self.free_queue.remove(other)
        kept, dropped = (block, other) if other.block_hash == block.block_hash else (other, block)
        kept.was_hit |= dropped.was_hit
        self.map.forget((dropped,))
        self.free_queue.prepend(dropped)
        self.free_queue.append(kept)
