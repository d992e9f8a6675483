"""The three reuse orders: runs of blocks move as their blocks would one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.block import Block, FreeQueue
from engine.segmented_queue import SegmentedQueue
from engine.tenant_queue import ReuseQueue, TenantQueue

TENANTS = (None, "a", "b")


def plain(blocks: list[Block]) -> ReuseQueue:
    return FreeQueue(blocks)


def segmented(blocks: list[Block]) -> ReuseQueue:
    return SegmentedQueue(blocks, share=0.25, num_usable=len(blocks))


def by_tenant(blocks: list[Block]) -> ReuseQueue:
    shares = {"a": 0.2, "b": 0.3}
    return TenantQueue(blocks, shares=shares, num_usable=len(blocks), protected_share=0.25)


def play(make: Callable[[list[Block]], ReuseQueue], *, in_runs: bool) -> list[list[int]]:
    """Take, give back and take out blocks at random; return the order after every move."""
    source = random.Random(7)
    blocks = [Block(i) for i in range(40)]
    queue, orders = make(blocks), list[list[int]]()
    used: list[Block] = []
    for _ in range(200):
        tenant = source.choice(TENANTS)
        match source.choice(("take", "extend", "remove_all")):
            case "take":
                count = source.randint(0, min(6, len(queue)))
                each = [count] if in_runs else [1] * count
                used += [block for n in each for block in queue.take(n, tenant)]
            case "extend":
                source.shuffle(used)
                run = [used.pop() for _ in range(source.randint(0, len(used)))]
                for block in run:
                    block.was_hit = source.random() < 0.4
                for part in [run] if in_runs else [[block] for block in run]:
                    queue.extend(part)
            case "remove_all":
                found = list(queue)
                run = source.sample(found, min(len(found), source.randint(0, 4)))
                for part in [run] if in_runs else [[block] for block in run]:
                    queue.remove_all(part)
                used += run
        orders.append([block.block_id for block in queue])
        assert len(queue) == len(orders[-1]) == 40 - len(used)
    return orders


@pytest.mark.parametrize("make", [plain, segmented, by_tenant])
def test_a_run_moves_as_its_blocks_would(make: Callable[[list[Block]], ReuseQueue]) -> None:
    assert play(make, in_runs=True) == play(make, in_runs=False)


@pytest.mark.parametrize("make", [plain, segmented, by_tenant])
def test_more_blocks_than_there_are_cannot_be_taken(
    make: Callable[[list[Block]], ReuseQueue],
) -> None:
    with pytest.raises(IndexError, match="no free block"):
        make([Block(1), Block(2)]).take(3)


def test_a_block_is_never_queued_twice_nor_taken_out_twice() -> None:
    first, second = blocks = [Block(1), Block(2)]
    queue = FreeQueue(blocks)
    with pytest.raises(AssertionError, match="in the free queue already"):
        queue.extend([first])
    queue.remove_all([second])
    with pytest.raises(AssertionError, match="is not in the free queue"):
        queue.remove_all([second])
