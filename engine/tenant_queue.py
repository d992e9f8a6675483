"""The reuse order of a pool whose tenants have guaranteed shares.

Plain least-recently-used order (or that of segmented_queue.py), except that a tenant which holds no
more than its share loses nothing to others while they can take from somebody else. Shares guarantee
what stays cached; no request is ever refused for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from engine.block import Block, FreeQueue
from engine.segmented_queue import SegmentedQueue, make_queue

_Queue = FreeQueue | SegmentedQueue


class ReuseQueue(Protocol):
    """The free blocks of a pool; FreeQueue or SegmentedQueue, or a TenantQueue of such."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """Walk in an order in which children stand before their parents."""
        ...

    def take(self, count: int, tenant: str | None = None) -> list[Block]:
        """Take the blocks to be reused next for a tenant; IndexError when there are fewer."""
        ...

    def append(self, block: Block) -> None:
        """Put a block whose contents matter where it is reused last."""
        ...

    def extend(self, blocks: Sequence[Block]) -> None:
        """Put blocks whose contents matter where they are reused last, one after the other."""
        ...

    def prepend(self, block: Block) -> None:
        """Put a block whose contents do not matter where it is reused first."""
        ...

    def postpone(self, block: Block) -> None:
        """Move a block of the queue to where it is reused last of all."""
        ...

    def remove(self, block: Block) -> None:
        """Unlink a block from wherever it stands."""
        ...

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Unlink blocks from wherever they stand."""
        ...

    def set_usable(self, num_usable: int) -> None:
        """Take the shares of a pool of so many blocks from now on."""
        ...


class TenantQueue:
    """Free blocks by owner; `shares` are parts of the pool, tenant -> 0 to 1.

    `num_held` counts the blocks in use and the cached ones of each tenant with a share. NOTE: a
    chain belongs to whoever computed its first block, with all its branches, so one queue holds
    it all and its order keeps a child before its parent. Tenants whose salts differ share no
    chain.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        shares: Mapping[str, float],
        num_usable: int,
        protected_share: float = 0.0,
    ) -> None:
        self.shares = dict(shares)
        self.num_held = dict.fromkeys(shares, 0)
        self._contentless = FreeQueue([])
        self._cached: dict[str | None, _Queue] = {
            tenant: make_queue([], protected_share=protected_share, num_usable=num_usable)
            for tenant in (None, *shares)
        }
        self._postponed = FreeQueue([])
        self._queue_of: dict[int, _Queue] = {}
        self._num_queued = 0
        self._guaranteed: dict[str, int] = {}
        self.set_usable(num_usable)
        for block in reversed(blocks):
            self.prepend(block)

    def set_usable(self, num_usable: int) -> None:
        """Take the shares of a pool of so many blocks from now on."""
        self._guaranteed = {t: int(share * num_usable) for t, share in self.shares.items()}
        for tenant, queue in self._cached.items():
            queue.set_usable(num_usable if tenant is None else self._guaranteed[tenant])

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[Block]:
        yield from self._contentless
        for queue in self._cached.values():
            yield from queue
        yield from self._postponed

    def popleft(self, tenant: str | None = None) -> Block:
        """Take a block without contents, else the oldest that the tenant may take; O(shares)."""
        queue = self._contentless or self._choose(tenant) or self._postponed
        block = queue.popleft()
        del self._queue_of[block.block_id]
        self.own(block, tenant)
        return block

    def take(self, count: int, tenant: str | None = None) -> list[Block]:
        """Take blocks one after the other: each changes what the tenant may take next."""
        return [self.popleft(tenant) for _ in range(count)]

    def append(self, block: Block) -> None:
        """Queue a cached block behind those that its owner gave back before."""
        self._num_queued += 1
        block.queued_at = self._num_queued
        queue = self._queue_of[block.block_id] = self._cached[block.owner]
        queue.append(block)

    def extend(self, blocks: Sequence[Block]) -> None:
        """Queue cached blocks, one after the other."""
        for block in blocks:
            self.append(block)

    def prepend(self, block: Block) -> None:
        """Queue a block without contents; it belongs to nobody any more."""
        self.own(block, None)
        self._queue_of[block.block_id] = self._contentless
        self._contentless.prepend(block)

    def postpone(self, block: Block) -> None:
        """Keep a block until all others are reused, whosever they are, or until `settle`."""
        self.remove(block)
        self._queue_of[block.block_id] = self._postponed
        self._postponed.append(block)

    def settle(self) -> None:
        """Queue what was postponed among the blocks of its owner, behind them."""
        for block in list(self._postponed):
            self.remove(block)
            self.append(block)

    def remove(self, block: Block) -> None:
        """Unlink a block; it keeps its owner."""
        self._queue_of.pop(block.block_id).remove(block)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Unlink blocks; they keep their owners."""
        for block in blocks:
            self.remove(block)

    def own(self, block: Block, tenant: str | None) -> None:
        """Charge a block to a tenant, or to nobody; one without a share counts as nobody."""
        if block.owner is not None:
            self.num_held[block.owner] -= 1
        block.owner = tenant if tenant in self.num_held else None
        if block.owner is not None:
            self.num_held[block.owner] += 1

    def _choose(self, tenant: str | None) -> _Queue | None:
        """Return the queue with the oldest block of those that may lose one, else of all."""
        queues = [(owner, queue) for owner, queue in self._cached.items() if queue]
        open_queues = [
            queue
            for owner, queue in queues
            if owner is None or owner == tenant or self.num_held[owner] > self._guaranteed[owner]
        ]
        return min(open_queues or [queue for _, queue in queues], key=_age, default=None)


def _age(queue: _Queue) -> int:
    return queue.first.queued_at
