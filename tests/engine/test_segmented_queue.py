"""Blocks that a request has hit outlive a flood of prompts that nobody repeats."""

from __future__ import annotations

import pytest

from engine.block import Block
from engine.core import EngineCore
from engine.segmented_queue import SegmentedQueue
from tests.engine.build import make_core, make_request, run

SHARED = list(range(16))


def flooded(core: EngineCore, *, tenant: str | None = None) -> int:
    """Hit a prefix, then run prompts of others that fill the pool twice; return the next hit."""
    for name in ("first", "second"):
        run(core, make_request(name, [*SHARED, 250], max_tokens=1, tenant=tenant))
    for i in range(12):
        run(core, make_request(f"flood{i}", [100 + i] * 12, max_tokens=1, tenant=tenant))
    return run(core, make_request("again", [*SHARED, 251], max_tokens=1)).cached["again"]


def test_plain_order_forgets_a_shared_prefix_in_a_flood() -> None:
    assert flooded(make_core(num_blocks=16)) == 0


def test_a_protected_prefix_survives_the_flood() -> None:
    assert flooded(make_core(num_blocks=16, protected_share=0.5)) == 16


def test_a_tenant_with_a_share_has_its_own_protected_blocks() -> None:
    core = make_core(num_blocks=16, kv_shares={"a": 0.9}, protected_share=0.5)
    assert flooded(core, tenant="a") == 16


def test_a_prefix_that_nobody_hits_again_makes_room_for_newer_ones() -> None:
    core = make_core(num_blocks=16, protected_share=0.2)
    assert flooded(core) == 12, "three of its four blocks are protected"
    old = [40] * 12
    for name in ("old", "old again"):
        run(core, make_request(name, [*old, 1], max_tokens=1))
    for i in range(6):
        prompt = [*[60 + i] * 12, 1]
        for turn in range(2):
            run(core, make_request(f"new{i}-{turn}", prompt, max_tokens=1))
    assert run(core, make_request("late", [*old, 2], max_tokens=1)).cached["late"] == 0


@pytest.fixture
def blocks() -> list[Block]:
    return [Block(i) for i in range(6)]


def ids(queue: SegmentedQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_what_was_hit_goes_after_what_was_not(blocks: list[Block]) -> None:
    queue = SegmentedQueue([], share=0.5, num_usable=4)
    blocks[1].was_hit = blocks[3].was_hit = True
    for block in blocks:
        queue.append(block)
    assert ids(queue) == [0, 2, 4, 5, 1, 3]
    assert queue.first is blocks[0]


def test_beyond_the_share_the_oldest_protected_goes_behind_the_rest(blocks: list[Block]) -> None:
    queue = SegmentedQueue([], share=0.5, num_usable=4)
    for block in blocks[3:]:
        block.was_hit = True
    for block in blocks:
        queue.append(block)
    queue.remove(blocks[0])
    queue.postpone(blocks[4])
    assert ids(queue) == [1, 2, 3, 5, 4]
    queue.remove(blocks[3])
    queue.prepend(blocks[3])
    assert [queue.popleft().block_id for _ in range(len(queue))] == [3, 1, 2, 5, 4]
    with pytest.raises(IndexError):
        queue.popleft()
