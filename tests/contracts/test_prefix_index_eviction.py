"""What is left of a chain when the engine's own pool evicts: the head, and the index knows."""

from __future__ import annotations

import pytest

from engine.block import Block
from engine.block_pool import BlockPool
from kvindex.event_stream import index_ops
from kvindex.events import EventBatch
from kvindex.hashing import BlockHash
from kvindex.index import SequencedOps
from tests.contracts.index_subject import BOOT_NS, A, Subject, chain


class Engine:
    """A pool whose events go into an index, batch by batch."""

    def __init__(self, subject: Subject, *, num_usable: int) -> None:
        self.pool = BlockPool(num_usable + 1, block_size=16)
        self._subject = subject
        self._seq = 0

    def write(self, hashes: list[bytes]) -> list[Block]:
        """Hold a chain in new blocks, as a request that is running."""
        blocks = self.pool.allocate(len(hashes))
        for i, block in enumerate(blocks):
            parent = BlockHash(hashes[i - 1]) if i else None
            self.pool.commit(block, BlockHash(hashes[i]), parent)
        return blocks

    def finish(self, blocks: list[Block]) -> None:
        """Give the blocks of a request back, deepest first."""
        self.pool.free(blocks[::-1])

    async def publish(self) -> None:
        """Apply what has happened since the last batch."""
        index = self._subject.index
        if self._seq == 0:
            self._epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
        ops = index_ops(EventBatch(0.0, self.pool.take_events()))
        await index.apply(A, self._epoch, [SequencedOps(self._seq, ops)])
        self._seq += 1


@pytest.mark.fault("router-30")
async def test_a_chain_of_ten_in_room_for_nine_keeps_nine(subject: Subject) -> None:
    engine, hashes = Engine(subject, num_usable=10), chain(10)
    engine.finish(engine.write(hashes))
    engine.pool.allocate(1)
    await engine.publish()
    assert await subject.matched(hashes) == {"a": 9}


@pytest.mark.fault("router-30")
@pytest.mark.parametrize("num_taken", [0, 1, 4, 9, 10])
async def test_each_block_that_is_taken_shortens_the_chain_by_its_tail(
    subject: Subject, num_taken: int
) -> None:
    engine, hashes = Engine(subject, num_usable=10), chain(10)
    engine.finish(engine.write(hashes))
    await engine.publish()
    for _ in range(num_taken):
        engine.pool.allocate(1)
        await engine.publish()
    assert await subject.matched(hashes) == {"a": 10 - num_taken}


@pytest.mark.fault("router-30")
async def test_a_head_in_use_outlives_the_tails_of_all_its_children(subject: Subject) -> None:
    """Two chains share four blocks; one is read again later, so the other goes first."""
    engine = Engine(subject, num_usable=12)
    head, left, right = chain(4, "head"), chain(4, "left"), chain(4, "right")
    shared = engine.write(head)
    tails = []
    for tail in (left, right):
        engine.pool.touch(shared)
        blocks = engine.pool.allocate(4)
        for i, block in enumerate(blocks):
            parent = BlockHash(tail[i - 1] if i else head[-1])
            engine.pool.commit(block, BlockHash(tail[i]), parent)
        tails.append(blocks)
    engine.finish(shared)
    engine.finish([*shared, *tails[1]])
    engine.finish([*shared, *tails[0]])
    engine.pool.allocate(6)
    await engine.publish()
    assert await subject.matched([*head, *right]) == {"a": 4}
    assert await subject.matched([*head, *left]) == {"a": 6}
