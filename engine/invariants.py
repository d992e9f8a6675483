"""What must hold between steps, whatever happened; assertions about our own code.

Run by tests after every rule, by the `check_integrity` setting after every step. The numbers are
those of the pool specification (I1 to I9), extended by prefix closure.
"""

from __future__ import annotations

from collections import Counter

from engine.block_pool import BlockPool
from engine.request import RequestStatus
from engine.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError, naming the offender, unless every invariant holds; O(pool)."""
    check_pool(scheduler.pool)
    _check_ownership(scheduler)
    _check_queues(scheduler)


def check_pool(pool: BlockPool) -> None:
    """Check the free queue, the hash map and the reuse order of a pool."""
    position = {block.block_id: i for i, block in enumerate(pool.free_queue)}
    assert len(position) == pool.num_free, "free queue: length and list disagree"
    assert 0 not in position, "the null block is in the free queue"
    for block in pool.blocks[1:]:
        free = block.block_id in position
        assert free == (block.ref_cnt == 0), f"I1: {block} free={free}"
        if block.block_hash is not None:
            assert block in pool.copies(block.block_hash), f"I3: {block} is not in the map"
    for block_hash in pool.cached_hashes():
        copies = pool.copies(block_hash)
        assert copies, f"I3: {block_hash.hex()[:8]} maps to nothing"
        assert all(c.block_hash == block_hash for c in copies), "I3: map and block disagree"
        _check_parent(pool, block_hash, position)


def _check_parent(pool: BlockPool, block_hash: bytes, position: dict[int, int]) -> None:
    """Check that some copy of the parent outlives every copy of the block."""
    for block in pool.copies(block_hash):  # type: ignore[arg-type]
        if block.parent_hash is None:
            continue
        parents = pool.copies(block.parent_hash)
        assert parents, f"prefix closure: {block} has no cached parent"
        if any(parent.ref_cnt for parent in parents):
            continue
        assert block.ref_cnt == 0, f"{block} is in use, every copy of its parent is free"
        last_parent = max(position[parent.block_id] for parent in parents)
        assert position[block.block_id] < last_parent, f"{block} is reused after its parent"


def _check_ownership(scheduler: Scheduler) -> None:
    """Check that reference counts equal the uses in block tables."""
    uses: Counter[int] = Counter()
    for request_id, table in scheduler.kv_cache.tables.items():
        request = scheduler.requests.get(request_id)
        assert request is not None, f"{request_id} is gone but holds blocks"
        assert request.status is RequestStatus.RUNNING, f"{request_id} holds blocks, not running"
        ids = [block.block_id for block in table.blocks]
        assert len(set(ids)) == len(ids), f"{request_id} holds a block twice"
        uses.update(ids)
    for block in scheduler.pool.blocks[1:]:
        assert block.ref_cnt == uses[block.block_id], f"{block} has {uses[block.block_id]} users"


def _check_queues(scheduler: Scheduler) -> None:
    """Check that every live request is in exactly the queue that its status names."""
    running = {r.request_id for r in scheduler.running}
    waiting = {r.request_id for r in scheduler.waiting}
    assert not running & waiting, "a request waits and runs"
    assert running | waiting == set(scheduler.requests), "a live request is in no queue"
    assert running == set(scheduler.kv_cache.tables), "running requests and block tables differ"
    for request in scheduler.running:
        table = scheduler.kv_cache.tables[request.request_id]
        held = len(table.blocks) * scheduler.pool.block_size
        assert request.num_computed_tokens <= held, f"{request.request_id} outgrew its blocks"
        assert request.num_computed_tokens <= request.num_tokens
