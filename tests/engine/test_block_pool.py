"""The block pool: reuse order, copies, events, and what must not change anything."""

from __future__ import annotations

import pytest

from engine.block import Block
from engine.block_pool import BlockPool
from engine.invariants import check_pool
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvindex.hashing import BlockHash, HashScheme, hash_tokens

CHAIN = hash_tokens(range(40), HashScheme(block_size=4))


def cache_chain(pool: BlockPool, hashes: list[BlockHash]) -> list[Block]:
    """Allocate and commit one block per hash, in order."""
    blocks = pool.allocate(len(hashes))
    for i, block in enumerate(blocks):
        pool.commit(block, hashes[i], hashes[i - 1] if i else None)
    return blocks


def stored(events: list[KVEvent]) -> list[BlockStored]:
    """Return the events if all of them are of stored blocks."""
    assert all(isinstance(event, BlockStored) for event in events)
    return [event for event in events if isinstance(event, BlockStored)]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5, block_size=4)
    assert [block.block_id for block in pool.allocate(4)] == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_freed_chain_is_reused_from_its_end() -> None:
    pool = BlockPool(4, block_size=4)
    blocks = cache_chain(pool, CHAIN[:3])
    pool.free(blocks[::-1])
    assert pool.allocate(1) == [blocks[2]]
    assert [pool.get_cached(h) for h in CHAIN[:3]] == [blocks[0], blocks[1], None]


def test_blocks_without_a_hash_are_reused_first() -> None:
    pool = BlockPool(4, block_size=4)
    cached = cache_chain(pool, CHAIN[:1])
    partial = pool.allocate(1)
    pool.free(cached)
    pool.free(partial)
    assert pool.allocate(1) == partial


def test_a_hit_leaves_the_free_queue_and_keeps_its_hash() -> None:
    pool = BlockPool(3, block_size=4)
    blocks = cache_chain(pool, CHAIN[:2])
    pool.free(blocks[::-1])
    pool.touch(blocks[:1])
    assert pool.num_free == 1
    assert pool.get_cached(CHAIN[0]) is blocks[0]
    check_pool(pool)


def test_only_the_first_copy_stores_and_only_the_last_removes() -> None:
    pool = BlockPool(4, block_size=4)
    first = cache_chain(pool, CHAIN[:1])
    second = cache_chain(pool, CHAIN[:1])
    assert [type(e) for e in pool.take_events()] == [BlockStored]
    pool.free(first)
    assert pool.take_events() == []
    assert pool.get_cached(CHAIN[0]) is second[0]
    pool.free(second)
    pool.allocate(3)
    assert pool.take_events() == [BlockRemoved(block_hashes=[CHAIN[0]], group_idx=0)]
    check_pool(pool)


def test_a_surviving_free_copy_takes_the_place_of_the_later_one() -> None:
    """Else the copy in front, a parent, would be reused before its own child."""
    pool = BlockPool(6, block_size=4)
    first = cache_chain(pool, CHAIN[:1])
    pool.free(first)
    parent = pool.allocate(1)[0]
    assert parent is not first[0]
    pool.commit(parent, CHAIN[0], None)
    child = pool.allocate(1)[0]
    pool.commit(child, CHAIN[1], CHAIN[0])
    pool.free([child, parent])
    check_pool(pool)
    assert pool.get_cached(CHAIN[0]) is parent
    order = list(pool.free_queue)
    assert order.index(child) < order.index(parent)
    assert order[0] is first[0]


def test_a_second_copy_is_reused_first_while_somebody_uses_the_other() -> None:
    pool = BlockPool(5, block_size=4)
    used = cache_chain(pool, CHAIN[:1])
    other = cache_chain(pool, [CHAIN[5]])
    copy = cache_chain(pool, CHAIN[:1])
    pool.free(other)
    pool.free(copy)
    assert copy[0].block_hash is None
    assert next(iter(pool.free_queue)) is copy[0]
    assert pool.copies(CHAIN[0]) == tuple(used)
    check_pool(pool)


def test_events_join_runs_and_name_the_parent() -> None:
    pool = BlockPool(8, block_size=4)
    cache_chain(pool, CHAIN[:2])
    blocks = pool.allocate(1)
    pool.commit(blocks[0], CHAIN[2], CHAIN[1])
    stored = pool.take_events()
    assert stored == [
        BlockStored(
            block_hashes=[*CHAIN[:3]],
            parent_block_hash=None,
            token_ids=[],
            block_size=4,
            group_idx=0,
        )
    ]


def test_a_run_is_committed_as_its_blocks_would_be_one_by_one() -> None:
    at_once, in_turn = BlockPool(8, block_size=4), BlockPool(8, block_size=4)
    cache_chain(in_turn, CHAIN[:6])
    at_once.commit_run(at_once.allocate(6), CHAIN[:6], None)
    assert at_once.take_events() == in_turn.take_events()
    for block_hash, parent_hash in zip(CHAIN[:6], [None, *CHAIN[:5]], strict=True):
        (block,) = at_once.copies(block_hash)
        assert block.parent_hash == parent_hash
    check_pool(at_once)


def test_a_hash_that_is_known_parts_a_run_in_the_events() -> None:
    pool = BlockPool(8, block_size=4)
    (known,) = pool.allocate(1)
    pool.commit(known, CHAIN[2], CHAIN[1])
    pool.take_events()
    run = pool.allocate(5)
    pool.commit_run(run, CHAIN[:5], None)
    assert [(e.block_hashes, e.parent_block_hash) for e in stored(pool.take_events())] == [
        ([*CHAIN[:2]], None),
        ([*CHAIN[3:5]], CHAIN[2]),
    ]
    assert pool.copies(CHAIN[2]) == (known, run[2])
    pool.free(run[::-1])
    assert pool.copies(CHAIN[2]) == (known,)
    assert next(iter(pool.free_queue)) is run[2]
    check_pool(pool, closed_groups=())


def test_an_evicted_run_is_one_event_per_group_in_the_order_of_its_blocks() -> None:
    pool = BlockPool(5, block_size=4, num_groups=2)
    for group, hashes in ((0, CHAIN[:2]), (1, CHAIN[:1])):
        blocks = pool.allocate(len(hashes), group)
        pool.commit_run(blocks, hashes, None)
        pool.free(blocks[::-1])
    pool.take_events()
    pool.allocate(4)
    assert pool.take_events() == [
        BlockRemoved(block_hashes=[CHAIN[1], CHAIN[0]], group_idx=0),
        BlockRemoved(block_hashes=[CHAIN[0]], group_idx=1),
    ]
    check_pool(pool)


@pytest.mark.fault("engine-30")
def test_reset_refuses_while_a_block_is_in_use() -> None:
    pool = BlockPool(4, block_size=4)
    blocks = cache_chain(pool, CHAIN[:2])
    pool.free([blocks[1]])
    assert not pool.reset()
    assert pool.get_cached(CHAIN[0]) is blocks[0]
    pool.free([blocks[0]])
    pool.take_events()
    assert pool.reset()
    assert pool.take_events() == [AllBlocksCleared()]
    assert [pool.get_cached(h) for h in CHAIN[:2]] == [None, None]
    check_pool(pool)


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(3, block_size=4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_a_block_that_was_read_is_reused_last() -> None:
    pool = BlockPool(4, block_size=4)
    first, second = pool.allocate(2)
    pool.commit(first, CHAIN[0], None)
    pool.commit(second, CHAIN[5], None)
    pool.free([first, second])
    pool.refresh(first)
    assert [block.block_id for block in pool.allocate(3)] == [3, 2, 1]
    pool.refresh(first)
    assert first.ref_cnt == 1


def commit_units(pool: BlockPool, block: Block, hashes: list[BlockHash]) -> None:
    """Commit a block that covers several hash units from the start of the chain."""
    for i, block_hash in enumerate(hashes):
        pool.commit(block, block_hash, hashes[i - 1] if i else None)


def test_a_block_of_several_units_is_found_by_each_and_forgotten_whole() -> None:
    pool = BlockPool(2, block_size=4)
    (block,) = pool.allocate(1)
    commit_units(pool, block, CHAIN[:3])
    assert [pool.get_cached(h) for h in CHAIN[:4]] == [block, block, block, None]
    check_pool(pool)
    pool.free([block])
    pool.take_events()
    pool.allocate(1)
    assert pool.take_events() == [BlockRemoved(block_hashes=[*CHAIN[2::-1]], group_idx=0)]
    check_pool(pool)


@pytest.mark.parametrize("longer_first", [True, False])
def test_of_two_copies_the_one_that_reaches_further_stays(longer_first: bool) -> None:
    pool = BlockPool(3, block_size=4)
    longer, shorter = pool.allocate(2)
    commit_units(pool, longer, CHAIN[:3])
    commit_units(pool, shorter, CHAIN[:2])
    pool.free([longer, shorter] if longer_first else [shorter, longer])
    check_pool(pool)
    assert [pool.get_cached(h) for h in CHAIN[:3]] == [longer] * 3
    assert pool.allocate(1) == [shorter]


def test_groups_keep_the_same_hash_apart() -> None:
    pool = BlockPool(3, block_size=4, num_groups=2)
    (block,) = pool.allocate(1, group=1)
    pool.commit(block, CHAIN[0], None)
    assert pool.get_cached(CHAIN[0]) is None
    assert pool.get_cached(CHAIN[0], group=1) is block
    assert list(pool.cached_keys()) == [(1, CHAIN[0])]
    check_pool(pool)


def test_a_pool_of_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1, block_size=4)
