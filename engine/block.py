"""One KV-cache block and the queue of those that nobody uses.

Pure structure: what a block holds, and why it is freed, is decided in block_pool.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvindex.hashing import BlockHash


@dataclass(slots=True, eq=False)
class Block:
    """A piece of KV memory, addressed by `block_id`; it belongs to one cache group at a time.

    `generation` changes whenever the block is handed out or given back: whoever remembers
    (block_id, generation) can tell that the contents are no longer his.
    `block_hash` covers everything that is findable in it. A block of several hash units also
    lists the hashes that end inside of it, in `inner_hashes`, shortest first. `parent_hash` is the
    hash right before its first unit. `on_host`: it belongs to the host tier, not to the pool.
    `lora_name`: the adapter that computed what is findable in it; `tenant`: who had it computed.
    `was_hit`: another request has used it since.
    `owner` and `queued_at` belong to tenant_queue.py.
    """

    block_id: int
    ref_cnt: int = 0
    generation: int = 0
    group: int = 0
    block_hash: BlockHash | None = None
    parent_hash: BlockHash | None = None
    inner_hashes: list[BlockHash] | None = None
    lora_name: str | None = None
    tenant: str | None = None
    was_hit: bool = False
    on_host: bool = False
    owner: str | None = None
    queued_at: int = 0
    prev: Block | None = None
    next: Block | None = None

    @property
    def hashes(self) -> list[BlockHash]:
        """Every hash that ends in this block, shortest first; empty when it is not cached."""
        if self.block_hash is None:
            return []
        return [*(self.inner_hashes or ()), self.block_hash]

    def forget_hashes(self) -> None:
        """Hold contents that nobody can find."""
        self.block_hash = self.parent_hash = self.inner_hashes = self.lora_name = None
        self.was_hit = False

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash else "-"
        return f"Block({self.block_id}, ref={self.ref_cnt}, hash={name})"


class FreeQueue:
    """Free blocks in the order in which they will be reused; every operation is O(1).

    An intrusive doubly linked list, because a prefix hit takes blocks out of the middle. A block
    is linked exactly while its `ref_cnt` is 0 (and it is within the pool's size).
    """

    def __init__(self, blocks: list[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next, self._tail.prev = self._tail, self._head
        self._length = 0
        self.extend(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Walk from the block that is reused first; the queue must not change meanwhile."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def set_usable(self, num_usable: int) -> None:
        """Take note of the pool's size, of which this order makes nothing."""

    @property
    def first(self) -> Block:
        """The block that is reused first; IndexError when there is none."""
        first = self._head.next
        if first is None or first is self._tail:
            raise IndexError("no free block")
        return first

    def popleft(self, tenant: str | None = None) -> Block:
        """Take the block that is reused first, whoever asks; IndexError when there is none."""
        return self.take(1, tenant)[0]

    def take(self, count: int, tenant: str | None = None) -> list[Block]:
        """Take the blocks that are reused first, whoever asks; IndexError when there are fewer."""
        if count > self._length:
            raise IndexError("no free block")
        taken = []
        block = self._head.next
        for _ in range(count):
            assert block is not None
            taken.append(block)
            after = block.next
            block.prev = block.next = None
            block = after
        assert block is not None
        self._head.next, block.prev = block, self._head
        self._length -= count
        return taken

    def append(self, block: Block) -> None:
        """Put a block where it is reused last."""
        self.extend((block,))

    def extend(self, blocks: Sequence[Block]) -> None:
        """Put blocks where they are reused last, the last of them last of all."""
        last = self._tail.prev
        assert last is not None
        for block in blocks:
            assert block.prev is None, f"{block} is in the free queue already"
            last.next = block
            block.prev = last
            last = block
        last.next, self._tail.prev = self._tail, last
        self._length += len(blocks)

    def prepend(self, block: Block) -> None:
        """Put a block where it is reused first."""
        first = self._head.next
        assert first is not None
        assert block.prev is None, f"{block} is in the free queue already"
        self._head.next = first.prev = block
        block.prev, block.next = self._head, first
        self._length += 1

    def postpone(self, block: Block) -> None:
        """Move a block of the queue to where it is reused last."""
        self.remove(block)
        self.append(block)

    def remove(self, block: Block) -> None:
        """Unlink a block from wherever it stands."""
        self.remove_all((block,))

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Unlink blocks from wherever they stand."""
        for block in blocks:
            before, after = block.prev, block.next
            assert before is not None, f"{block} is not in the free queue"
            assert after is not None, f"{block} is not in the free queue"
            before.next, after.prev = after, before
            block.prev = block.next = None
        self._length -= len(blocks)
