"""What must hold between steps, whatever happened; assertions about our own code.

Run by tests after every rule, by the `check_integrity` setting after every step. The numbers are
those of the pool specification (I1 to I9), extended by prefix closure (of the pool, and of pool
and host tier together), cache groups and shares of tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from engine.block import Block
from engine.block_map import BlockMap
from engine.block_pool import BlockPool
from engine.host_tier import HostTier
from engine.request import RequestStatus
from engine.scheduler import Scheduler
from engine.tenant_queue import TenantQueue


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError, naming the offender, unless every invariant holds; O(pool)."""
    groups = scheduler.kv_cache.groups
    closed = [group.index for group in groups if group.rule and group.rule.kind == "full"]
    check_pool(scheduler.pool, closed_groups=closed)
    _check_ownership(scheduler)
    _check_tables(scheduler)
    _check_queues(scheduler)


def check_pool(pool: BlockPool, *, closed_groups: Collection[int] = (0,)) -> None:
    """Check the free queue, the hash map and the reuse order of a pool.

    Groups in `closed_groups` hold whole chains: none of their blocks outlives its parent.
    """
    position = {block.block_id: i for i, block in enumerate(pool.free_queue)}
    assert len(position) == pool.num_free, "free queue: length and list disagree"
    assert 0 not in position, "the null block is in the free queue"
    assert pool.null_block.ref_cnt == 1, "somebody counts uses of the null block"
    for block in pool.blocks:
        free = block.block_id in position
        if block.block_id < pool.num_blocks:
            assert free == (block.ref_cnt == 0), f"I1: {block} free={free}"
        else:
            assert not free, f"{block} is beyond the pool's size, but in the free queue"
            assert block.ref_cnt == 0, f"{block} is beyond the pool's size, but in use"
            assert block.block_hash is None, f"{block} is beyond the pool's size, but cached"
    _check_map(pool.map, pool.blocks)
    for group, block_hash in pool.map:
        if group in closed_groups:
            for block in pool.copies(block_hash, group):
                _check_parent(pool, block, position)
    if pool.tenants is not None:
        _check_tenants(pool.tenants, pool.blocks)
    if pool.host is not None:
        _check_host(pool, pool.host, closed_groups)


def _check_map(tier: BlockMap, blocks: Sequence[Block]) -> None:
    """Check that blocks and the map of a tier name the same hashes."""
    for block in blocks:
        assert block.block_hash is not None or block.inner_hashes is None, (
            f"{block} has inner hashes only"
        )
        for block_hash in block.hashes:
            assert block in tier.copies(block_hash, block.group), f"I3: {block} is not in the map"
    for group, block_hash in tier:
        copies = tier.copies(block_hash, group)
        assert copies, f"I3: {block_hash.hex()[:8]} maps to nothing"
        assert all(block_hash in c.hashes for c in copies), "I3: map and block disagree"
        assert all(c.group == group for c in copies), "I3: a block is listed in another group"


def _check_parent(pool: BlockPool, block: Block, position: dict[int, int]) -> None:
    """Check that some copy of the parent outlives a block."""
    if block.parent_hash is None:
        return
    parents = pool.copies(block.parent_hash, block.group)
    assert parents, f"prefix closure: {block} has no cached parent"
    if any(parent.ref_cnt for parent in parents):
        return
    assert block.ref_cnt == 0, f"{block} is in use, every copy of its parent is free"
    last_parent = max(position[parent.block_id] for parent in parents)
    assert position[block.block_id] < last_parent, f"{block} is reused after its parent"


def _check_tenants(tenants: TenantQueue, blocks: Sequence[Block]) -> None:
    """Check that whoever has a share is charged what he uses and what is cached for him."""
    held = Counter(block.owner for block in blocks if block.owner is not None)
    assert all(tenants.num_held[tenant] == held[tenant] for tenant in tenants.shares), (
        f"tenants are charged {tenants.num_held}, and hold {dict(held)}"
    )
    for block in blocks:
        alive = block.ref_cnt or block.block_hash is not None
        assert alive or block.owner is None, f"{block} holds nothing, but belongs to somebody"


def _check_host(pool: BlockPool, host: HostTier, closed_groups: Collection[int]) -> None:
    """Check the host tier: nothing pinned between steps, and closed together with the pool."""
    position = {block.block_id: i for i, block in enumerate(host.reuse_order)}
    assert len(position) == len(host.blocks), "a block of the host tier is pinned, or lost"
    _check_map(host.map, host.blocks)
    for group, block_hash in host.map:
        if group not in closed_groups:
            continue
        for block in host.map.copies(block_hash, group):
            parent_hash = block.parent_hash
            if parent_hash is None or pool.copies(parent_hash, group):
                continue
            parents = host.map.copies(parent_hash, group)
            assert parents, f"prefix closure: {block} has its parent in no tier"
            assert position[block.block_id] < max(position[p.block_id] for p in parents), (
                f"{block} leaves the host tier after its parent"
            )


def _check_ownership(scheduler: Scheduler) -> None:
    """Check that reference counts equal the uses in block tables."""
    uses: Counter[int] = Counter()
    for request_id, table in scheduler.kv_cache.tables.items():
        request = scheduler.requests.get(request_id)
        assert request is not None, f"{request_id} is gone but holds blocks"
        assert request.status is RequestStatus.RUNNING, f"{request_id} holds blocks, not running"
        ids = [block_id for group in table.block_ids for block_id in group if block_id]
        assert len(set(ids)) == len(ids), f"{request_id} holds a block twice"
        uses.update(ids)
    for block in scheduler.pool.blocks[1:]:
        assert block.ref_cnt == uses[block.block_id], f"{block} has {uses[block.block_id]} users"


def _check_tables(scheduler: Scheduler) -> None:
    """Check that every block which may still be read is there, in its group, and the reserves."""
    kv_cache = scheduler.kv_cache
    for request_id, table in kv_cache.tables.items():
        for group, held in zip(kv_cache.groups, table.groups, strict=True):
            assert all(b.group == group.index for b in held.blocks if b.block_id), (
                f"{request_id} has a block of another group in group {group.index}"
            )
            if not group.is_state:
                assert all(b.block_id for b in held.blocks[held.num_skipped :]), (
                    f"{request_id} lacks a block that group {group.index} reads"
                )
            elif table.num_processed:
                last = held.blocks[(table.num_processed - 1) // group.block_size]
                assert last.block_id, f"{request_id} lost its state in group {group.index}"
    assert kv_cache.num_open_steps <= scheduler.num_in_flight, "a step is never committed"
    reserved = sum(table.num_reserved for table in kv_cache.tables.values())
    assert reserved == kv_cache.num_reserved, "reserved blocks: sum and total disagree"
    assert reserved <= scheduler.pool.num_free, "more blocks are reserved than free"


def _check_queues(scheduler: Scheduler) -> None:
    """Check that every live request is in exactly the queue that its status names."""
    running = {r.request_id for r in scheduler.running}
    waiting = {r.request_id for r in scheduler.waiting}
    assert not running & waiting, "a request waits and runs"
    assert running | waiting == set(scheduler.requests), "a live request is in no queue"
    assert running == set(scheduler.kv_cache.tables), "running requests and block tables differ"
    preempted = sum(r.status is RequestStatus.PREEMPTED for r in scheduler.waiting)
    assert preempted == scheduler.num_preempted, "preempted requests: queue and count disagree"
    for request in scheduler.running:
        table = scheduler.kv_cache.tables[request.request_id]
        assert request.num_computed_tokens <= table.capacity, (
            f"{request.request_id} outgrew its blocks"
        )
        assert request.num_computed_tokens <= request.num_expected_tokens
