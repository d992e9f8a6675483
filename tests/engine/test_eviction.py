"""Who loses cached blocks to whom: guaranteed shares of the pool, and plain LRU without them."""

from __future__ import annotations

import pytest

from engine.block import Block, FreeQueue
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.invariants import check_pool
from engine.kv_groups.spec import FullAttention, SlidingWindow
from kvindex.foundation.errors import ConfigError
from kvindex.hashing import BlockHash, HashScheme, hash_tokens
from tests.engine.build import alone, make_core, make_request, run
from tests.engine.hybrid import alone_with, make_hybrid_core


def chain_of(tenant: str, num_blocks: int) -> list[BlockHash]:
    """Return a chain that only this tenant has."""
    return hash_tokens(range(4 * num_blocks), HashScheme(block_size=4), cache_salt=tenant)


def cache_for(pool: BlockPool, tenant: str, hashes: list[BlockHash]) -> list[Block]:
    """Let a tenant compute a chain and give its blocks back."""
    blocks = pool.allocate(len(hashes), tenant=tenant)
    for i, block in enumerate(blocks):
        pool.commit(block, hashes[i], hashes[i - 1] if i else None)
    pool.free(blocks[::-1])
    check_pool(pool)
    return blocks


def num_cached(pool: BlockPool, hashes: list[BlockHash]) -> int:
    """Count the blocks of a chain that are cached."""
    return sum(pool.get_cached(h) is not None for h in hashes)


def test_without_shares_the_queue_is_the_plain_one() -> None:
    pool = BlockPool(5, block_size=4)
    assert type(pool.free_queue) is FreeQueue
    assert pool.tenants is None


def test_without_shares_a_flood_evicts_whoever_was_idle_longest() -> None:
    pool = BlockPool(9, block_size=4)
    quiet, flood = chain_of("quiet", 4), chain_of("flood", 12)
    cache_for(pool, "quiet", quiet)
    for i in range(4):
        cache_for(pool, "flood", flood[3 * i : 3 * i + 1])
    assert num_cached(pool, quiet) == 4
    cache_for(pool, "flood", [h for i, h in enumerate(flood) if i % 3 == 1][:4])
    assert num_cached(pool, quiet) == 0


def independent(tenant: str, count: int) -> list[BlockHash]:
    """Return hashes of first blocks that have nothing to do with each other."""
    scheme = HashScheme(block_size=4)
    return [hash_tokens([i] * 4, scheme, cache_salt=tenant)[0] for i in range(count)]


@pytest.mark.parametrize("flood_share", [None, 0.25, 0.5])
def test_a_flood_takes_its_own_blocks_before_it_takes_a_tenant_below_its_share(
    flood_share: float | None,
) -> None:
    shares = {"quiet": 0.5} | ({} if flood_share is None else {"flood": flood_share})
    pool = BlockPool(9, block_size=4, shares=shares)
    quiet = chain_of("quiet", 4)
    cache_for(pool, "quiet", quiet)
    for block_hash in independent("flood", 30):
        cache_for(pool, "flood", [block_hash])
    assert num_cached(pool, quiet) == 4
    assert num_cached(pool, independent("flood", 30)[-4:]) == 4


def test_what_a_tenant_has_beyond_its_share_goes_in_lru_order() -> None:
    pool = BlockPool(9, block_size=4, shares={"quiet": 0.25})
    quiet = chain_of("quiet", 6)
    cache_for(pool, "quiet", quiet)
    for block_hash in independent("flood", 30):
        cache_for(pool, "flood", [block_hash])
    assert [pool.get_cached(h) is not None for h in quiet] == [True] * 2 + [False] * 4


def test_a_tenant_with_a_share_may_use_more_while_others_leave_it() -> None:
    pool = BlockPool(9, block_size=4, shares={"a": 0.25, "b": 0.25})
    hashes = chain_of("a", 8)
    cache_for(pool, "a", hashes)
    assert num_cached(pool, hashes) == 8


def test_within_its_own_blocks_a_tenant_keeps_lru_order() -> None:
    pool = BlockPool(5, block_size=4, shares={"a": 1.0})
    first, second = independent("a", 2)
    blocks = [*cache_for(pool, "a", [first]), *cache_for(pool, "a", [second])]
    pool.touch(blocks[:1])
    pool.free(blocks[:1])
    pool.allocate(3, tenant="a")
    assert pool.get_cached(first) is blocks[0]
    assert pool.get_cached(second) is None


def test_a_request_is_never_refused_for_a_share() -> None:
    """Everything belongs to somebody within his share: then the oldest goes all the same."""
    pool = BlockPool(9, block_size=4, shares={"a": 0.5, "b": 0.5})
    a, b = chain_of("a", 4), chain_of("b", 4)
    cache_for(pool, "a", a)
    cache_for(pool, "b", b)
    assert len(pool.allocate(2, tenant="c")) == 2
    assert (num_cached(pool, a), num_cached(pool, b)) == (2, 4)
    check_pool(pool)


def test_blocks_in_use_count_towards_a_share() -> None:
    pool = BlockPool(9, block_size=4, shares={"a": 0.5})
    hashes = independent("a", 2)
    for block_hash in hashes:
        cache_for(pool, "a", [block_hash])
    pool.allocate(3, tenant="a")
    pool.allocate(4, tenant="b")
    assert num_cached(pool, hashes) == 1
    check_pool(pool)


def test_a_chain_that_tenants_share_belongs_to_the_first_of_them_with_all_its_branches() -> None:
    """Else a protected child could outlive a parent that is not protected."""
    pool = BlockPool(9, block_size=4, shares={"second": 0.5})
    chain = hash_tokens(range(16), HashScheme(block_size=4))
    cache_for(pool, "first", chain[:2])
    parents = [pool.get_cached(h) for h in chain[:2]]
    held = [block for block in parents if block is not None]
    pool.touch(held)
    branch = pool.allocate(2, tenant="second")
    for i, block in enumerate(branch):
        pool.commit(block, chain[2 + i], chain[1 + i])
    assert pool.tenants is not None
    assert pool.tenants.num_held == {"second": 0}
    pool.free([*branch[::-1], *held[::-1]])
    for block_hash in independent("flood", 6):
        cache_for(pool, "flood", [block_hash])
    assert [pool.get_cached(h) is not None for h in chain] == [True, True, False, False]


def test_what_comes_back_from_the_host_tier_belongs_to_the_tenant_of_its_chain() -> None:
    """The second of two blocks is restored for somebody else."""
    pool = BlockPool(5, block_size=4, shares={"a": 0.5, "b": 0.5}, num_host_blocks=4)
    assert pool.host is not None
    assert pool.tenants is not None
    chain = chain_of("a", 2)
    root, _ = cache_for(pool, "a", chain)
    pool.touch([root])
    pool.free(pool.allocate(3, tenant="b"))
    (stored,) = pool.host.map.copies(chain[1], 0)
    pool.host.pin([stored])
    restored = pool.restore(stored, tenant="b")
    pool.host.unpin([stored])
    assert restored.owner == "a"
    assert pool.tenants.num_held == {"a": 2, "b": 0}
    pool.free([restored, root])
    check_pool(pool)


def test_a_reset_forgets_who_held_what() -> None:
    pool = BlockPool(9, block_size=4, shares={"a": 0.5})
    cache_for(pool, "a", chain_of("a", 4))
    assert pool.reset()
    assert pool.tenants is not None
    assert pool.tenants.num_held == {"a": 0}
    check_pool(pool)


def test_shares_follow_the_size_of_the_pool() -> None:
    pool = BlockPool(17, block_size=4, shares={"quiet": 0.5})
    quiet = chain_of("quiet", 4)
    cache_for(pool, "quiet", quiet)
    pool.shrink(5, closed_groups=[0])
    check_pool(pool)
    for block_hash in independent("flood", 9):
        cache_for(pool, "flood", [block_hash])
    assert num_cached(pool, quiet) == 2


def test_a_tenant_that_floods_the_engine_leaves_the_share_of_another_alone() -> None:
    core = make_core(num_blocks=21, kv_shares={"quiet": 0.5}, max_num_seqs=2)
    request = make_request("q", range(30), max_tokens=1, tenant="quiet", salt="quiet")
    run(core, request)
    floods = [
        make_request(f"f{i}", [100 + i] * 20, max_tokens=4, tenant="flood", salt="flood")
        for i in range(20)
    ]
    flooded = run(core, *floods)
    again = make_request("again", range(30), max_tokens=4, tenant="quiet", salt="quiet")
    result = run(core, again)
    assert result.cached["again"] == 28
    assert result.tokens["again"] == alone(again)
    assert flooded.tokens == {r.request_id: alone(r) for r in floods}


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_is_no_part_of_the_pool_is_refused_by_name(share: float) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_shares\.a is .* at most 1"):
        EngineConfig(kv_shares={"a": share})


def test_shares_that_add_up_to_more_than_the_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_shares add up to 1\.1; expected 1 at most"):
        EngineConfig(kv_shares={"a": 0.6, "b": 0.5})
    assert EngineConfig(kv_shares=dict.fromkeys("abcdefghij", 0.1)).kv_shares["a"] == 0.1


def test_no_tail_is_overwritten_before_it_is_copied_while_another_tenant_is_protected() -> None:
    """All that the request may take is what it hits: a head on the host, and two tails."""
    groups = (FullAttention(block_size=16), SlidingWindow(window=100, block_size=16))
    core = make_hybrid_core(
        groups,
        num_blocks=11,
        num_host_blocks=4,
        kv_shares={"quiet": 1.0},
        check_integrity=False,
    )
    run(core, make_request("a", range(24), max_tokens=1))
    run(core, make_request("q", [90] * 40, max_tokens=1, tenant="quiet", salt="quiet"))
    pool = core.kv_cache.pool
    assert pool.num_free == 10
    cached = [block for block in pool.free_queue if block.owner is None and block.block_hash]
    (window_head,) = [b for b in cached if b.group == 1 and b.parent_hash is None]
    for block in cached:
        if block is not window_head:
            pool.refresh(block)
    pool.settle()
    assert pool.allocate(1)[0] is window_head
    request = make_request("b", [*range(24), 77], max_tokens=4)
    result = run(core, request)
    assert pool.host is not None
    assert pool.host.num_loaded == 1
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(groups, request)
