"""A reuse order that keeps what has been hit: a flood of prompts that nobody repeats passes it by.

Two segments, each least recently used first (segmented LRU; Karedla, Love and Wherry, 1994): what
no other request has used goes before what one has. It knows neither tenants nor requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.block import Block, FreeQueue


class SegmentedQueue:
    """Free blocks like FreeQueue's; at most `share` of a pool's blocks are protected in it.

    Every operation is O(1), amortised. NOTE: a hit marks a whole prefix, so a child that is
    protected has a protected parent; both segments have children before their parents, and so has
    the one after the other. What is protected no longer goes behind the rest, oldest first: a
    child still before its parent.
    """

    def __init__(self, blocks: list[Block], *, share: float, num_usable: int) -> None:
        self._share = share
        self._max_protected = 0
        self._probation = FreeQueue(blocks)
        self._protected = FreeQueue([])
        self._protected_ids: set[int] = set()
        self.set_usable(num_usable)

    def set_usable(self, num_usable: int) -> None:
        """Take the share of a pool of so many blocks from now on."""
        self._max_protected = int(self._share * num_usable)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[Block]:
        """Walk from the block that is reused first; the queue must not change meanwhile."""
        yield from self._probation
        yield from self._protected

    @property
    def first(self) -> Block:
        """The block that is reused first; IndexError when there is none."""
        return (self._probation or self._protected).first

    def popleft(self, tenant: str | None = None) -> Block:
        """Take the block that is reused first, whoever asks; IndexError when there is none."""
        block = self.first
        self.remove(block)
        return block

    def take(self, count: int, tenant: str | None = None) -> list[Block]:
        """Take the blocks that are reused first, whoever asks; IndexError when there are fewer."""
        return [self.popleft() for _ in range(count)]

    def append(self, block: Block) -> None:
        """Put a block where it is reused last of its kind."""
        if not block.was_hit:
            self._probation.append(block)
            return
        self._protected_ids.add(block.block_id)
        self._protected.append(block)
        while len(self._protected) > self._max_protected:
            oldest = self._protected.first
            self.remove(oldest)
            self._probation.append(oldest)

    def extend(self, blocks: Sequence[Block]) -> None:
        """Put blocks where they are reused last of their kind, one after the other."""
        for block in blocks:
            self.append(block)

    def prepend(self, block: Block) -> None:
        """Put a block where it is reused first."""
        self._probation.prepend(block)

    def postpone(self, block: Block) -> None:
        """Move a block of the queue to where it is reused last of its kind."""
        self.remove(block)
        self.append(block)

    def remove(self, block: Block) -> None:
        """Unlink a block from wherever it stands."""
        if block.block_id in self._protected_ids:
            self._protected_ids.remove(block.block_id)
            self._protected.remove(block)
        else:
            self._probation.remove(block)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Unlink blocks from wherever they stand."""
        for block in blocks:
            self.remove(block)


def make_queue(
    blocks: list[Block], *, protected_share: float, num_usable: int
) -> FreeQueue | SegmentedQueue:
    """Return the queue of a share; without one, plain least-recently-used order."""
    if not protected_share:
        return FreeQueue(blocks)
    return SegmentedQueue(blocks, share=protected_share, num_usable=num_usable)
