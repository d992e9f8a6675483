"""The host tier: what it takes in, what it gives back, what leaves it first, what is announced."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.block import Block
from engine.block_pool import BlockPool
from engine.core import EngineCore
from engine.executor import execute
from engine.invariants import check_integrity, check_pool
from engine.kv_groups.spec import FullAttention, KVGroupSpec, LinearState
from engine.messages import SnapshotEntry
from engine.request import Request
from engine.restore_cost import RestoreCost
from engine.scripted_executor import ScriptedExecutor, StepCost
from engine.stats import StepRates
from engine.transfer import BlockCopy, BlockTransfer, HostLoad, HostStore
from kvindex.event_stream import index_ops
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent
from kvindex.foundation.clock import VirtualClock
from kvindex.hashing import BlockHash, HashScheme, hash_tokens
from kvindex.index import SequencedOps, Target
from kvindex.memory_index import MemoryIndex
from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request, run
from tests.engine.hybrid import GROUPS, alone_with, make_hybrid_core

CHAIN = hash_tokens(range(60), HashScheme(block_size=4))
OTHER = hash_tokens(range(100, 160), HashScheme(block_size=4))


def cache_chain(pool: BlockPool, hashes: list[BlockHash]) -> list[Block]:
    """Allocate, commit and free one block per hash; return them in the order of the chain."""
    blocks = pool.allocate(len(hashes))
    for i, block in enumerate(blocks):
        pool.commit(block, hashes[i], hashes[i - 1] if i else None)
    pool.free(blocks[::-1])
    return blocks


def host_hashes(pool: BlockPool) -> set[BlockHash]:
    """Return what the host tier holds."""
    assert pool.host is not None
    return set(pool.host.map.hashes(0))


def churn(core: EngineCore, num_requests: int) -> None:
    """Run requests of 20 tokens that nothing else uses, so that what is cached is evicted."""
    for i in range(num_requests):
        run(core, make_request(f"churn{i}", [200 + i] * 20, max_tokens=1))


def test_an_evicted_block_is_stored_and_announced_there_before_it_is_gone_here() -> None:
    pool = BlockPool(3, block_size=4, num_host_blocks=4)
    blocks = cache_chain(pool, CHAIN[:2])
    pool.take_events()
    pool.allocate(1)
    assert pool.take_transfers() == [HostStore(blocks[1].block_id, 0)]
    assert pool.take_events() == [
        BlockStored(
            block_hashes=[CHAIN[1]],
            parent_block_hash=CHAIN[0],
            token_ids=[],
            block_size=4,
            medium="CPU",
            group_idx=0,
        ),
        BlockRemoved(block_hashes=[CHAIN[1]], medium="GPU", group_idx=0),
    ]
    check_pool(pool)


def test_a_second_copy_is_not_stored() -> None:
    """The first copy is evicted while somebody uses the second."""
    pool = BlockPool(4, block_size=4, num_host_blocks=4)
    (first,) = cache_chain(pool, CHAIN[:1])
    (second,) = pool.allocate(1)
    pool.commit(second, CHAIN[0], None)
    assert first in pool.allocate(2)
    assert pool.take_transfers() == []
    assert pool.get_cached(CHAIN[0]) is second
    check_pool(pool)


def test_what_is_in_the_host_tier_already_is_not_stored_again() -> None:
    pool = BlockPool(3, block_size=4, num_host_blocks=4)
    assert pool.host is not None
    cache_chain(pool, CHAIN[:1])
    pool.free(pool.allocate(2))
    (stored,) = pool.host.map.copies(CHAIN[0], 0)
    pool.take_transfers()
    pool.host.pin([stored])
    restored = pool.restore(stored)
    pool.host.unpin([stored])
    assert pool.take_transfers() == [HostLoad(stored.block_id, restored.block_id)]
    pool.free([restored])
    pool.allocate(2)
    assert pool.take_transfers() == []
    assert host_hashes(pool) == {CHAIN[0]}


def test_in_the_host_tier_too_a_child_goes_before_its_parent() -> None:
    """The parent is stored first, and then evicted again after a child that is new."""
    pool = BlockPool(3, block_size=4, num_host_blocks=2)
    assert pool.host is not None
    cache_chain(pool, CHAIN[:1])
    pool.free(pool.allocate(2))
    (parent,) = pool.host.map.copies(CHAIN[0], 0)
    pool.host.pin([parent])
    in_pool = pool.restore(parent)
    pool.host.unpin([parent])
    (child,) = pool.allocate(1)
    pool.commit(child, CHAIN[1], CHAIN[0])
    pool.free([child, in_pool])
    pool.free(pool.allocate(2))
    check_pool(pool)
    assert host_hashes(pool) == {CHAIN[0], CHAIN[1]}
    cache_chain(pool, OTHER[:1])
    pool.free(pool.allocate(2))
    check_pool(pool)
    assert host_hashes(pool) == {CHAIN[0], OTHER[0]}


def test_a_host_tier_whose_blocks_are_all_pinned_takes_nothing_in() -> None:
    pool = BlockPool(3, block_size=4, num_host_blocks=1)
    assert pool.host is not None
    cache_chain(pool, CHAIN[:1])
    pool.free(pool.allocate(2))
    (pinned,) = pool.host.map.copies(CHAIN[0], 0)
    pool.host.pin([pinned])
    cache_chain(pool, OTHER[:1])
    pool.free(pool.allocate(2))
    assert host_hashes(pool) == {CHAIN[0]}
    pool.host.unpin([pinned])
    check_pool(pool)


def test_a_reset_forgets_both_tiers_with_one_event() -> None:
    pool = BlockPool(3, block_size=4, num_host_blocks=4)
    cache_chain(pool, CHAIN[:2])
    pool.free(pool.allocate(1))
    pool.take_events()
    assert pool.reset()
    assert pool.take_events() == [AllBlocksCleared()]
    assert host_hashes(pool) == set()
    check_pool(pool)


def test_an_evicted_prefix_comes_back_and_gives_the_same_tokens() -> None:
    core = make_core(num_blocks=13, num_host_blocks=20)
    request = make_request("a", range(30), max_tokens=6)
    run(core, request)
    churn(core, 4)
    assert core.kv_cache.pool.get_cached(request_hashes(core, 30)[0]) is None
    again = make_request("b", range(30), max_tokens=6)
    result = run(core, again)
    assert result.cached["b"] == 28
    assert result.tokens["b"] == alone(again)


def request_hashes(core: EngineCore, num_tokens: int) -> list[BlockHash]:
    """Return the chain of the tokens 0, 1, 2 and so on."""
    return hash_tokens(range(num_tokens), core.config.hash_scheme)


def test_a_hit_may_start_in_the_pool_and_go_on_in_the_host_tier() -> None:
    core = make_core(num_blocks=13, num_host_blocks=20)
    run(core, make_request("a", range(40), max_tokens=1))
    run(core, make_request("b", [250] * 24, max_tokens=1))
    pool = core.kv_cache.pool
    chain = request_hashes(core, 40)
    in_pool = [pool.get_cached(h) is not None for h in chain]
    assert in_pool == [True] * 6 + [False] * 4
    again = make_request("c", range(40), max_tokens=4)
    core.add(again)
    result = Run(core)
    scheduled = core.scheduler.schedule()
    assert sum(isinstance(move, HostLoad) for move in scheduled.transfers) == 3
    assert scheduled.num_computed_tokens == {"c": 36}
    core.scheduler.update_from_output(scheduled, execute(core.executor, scheduled))
    result.to_end()
    assert core.scheduler.requests == {}


def test_a_burst_of_siblings_restores_their_prefix_once() -> None:
    core = make_core(num_blocks=40, num_host_blocks=40, max_num_seqs=16)
    run(core, make_request("a", range(32), max_tokens=1))
    churn(core, 10)
    siblings = [make_request(f"s{i}", [*range(32), 100 + i], max_tokens=2) for i in range(8)]
    for request in siblings:
        core.add(request)
    scheduled = core.scheduler.schedule()
    assert [type(move) for move in scheduled.transfers].count(HostLoad) == 8
    assert list(scheduled.num_scheduled_tokens.values()) == [1] * 8
    output = execute(core.executor, scheduled)
    core.scheduler.update_from_output(scheduled, output)
    assert {k: v[0] for k, v in output.sampled_token_ids.items()} == {
        r.request_id: alone(r)[0] for r in siblings
    }


@pytest.mark.fault("engine-36")
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_aborting_while_blocks_are_being_loaded_leaks_none(num_ahead: int) -> None:
    """The load is on its way to the executor; its block serves somebody else after that."""
    core = make_core(num_blocks=13, num_host_blocks=20, async_depth=2)
    run(core, make_request("a", range(30), max_tokens=1))
    churn(core, 4)
    core.add(make_request("loading", range(30), max_tokens=8))
    loading = [core.scheduler.schedule() for _ in range(1 + num_ahead)]
    assert any(isinstance(move, HostLoad) for move in loading[0].transfers)
    core.abort(["loading"])
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable
    check_integrity(core.scheduler)
    other = make_request("other", [90] * 40, max_tokens=1)
    core.add(other)
    taking = core.scheduler.schedule()
    for step in [*loading, taking]:
        core.executor.submit(step)
    outputs = []
    for step in [*loading, taking]:
        outputs += core.scheduler.update_from_output(step, core.executor.collect())
    assert [(o.request_id, o.token_ids) for o in outputs] == [("other", alone(other))]
    check_integrity(core.scheduler)
    again = make_request("again", range(30), max_tokens=3)
    assert run(core, again).tokens["again"] == alone(again)


@pytest.mark.fault("engine-36")
def test_a_load_that_never_completes_holds_nothing_back() -> None:
    """There is no completion to wait for: a load is part of the step that reads what it brings."""
    core = make_core(num_blocks=13, num_host_blocks=20, async_depth=2)
    run(core, make_request("a", range(30), max_tokens=1))
    churn(core, 4)
    core.add(make_request("loading", range(30), max_tokens=8))
    core.scheduler.schedule()
    core.abort(["loading"])
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable
    assert core.reset_prefix_cache(preempt_running=False)
    check_integrity(core.scheduler)


def test_a_preempted_request_gets_its_evicted_blocks_back() -> None:
    core = make_core(num_blocks=13, num_host_blocks=40, max_num_seqs=4)
    requests = [
        make_request(f"r{i}", [i * 20 + j for j in range(12)], max_tokens=24) for i in (1, 2)
    ]
    result = run(core, *requests)
    assert core.counters.preemptions > 0
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    assert core.kv_cache.pool.host is not None
    assert core.kv_cache.pool.host.num_loaded > 0


def test_a_block_of_the_host_tier_that_is_reused_gives_its_new_contents() -> None:
    """Eight blocks hold the last two of six prompts at most."""
    core = make_core(num_blocks=6, num_host_blocks=8)
    requests = [make_request(f"r{i}", [100 + i] * 16, max_tokens=3) for i in range(6)]
    for request in requests:
        run(core, request)
    host = core.kv_cache.pool.host
    assert host is not None
    assert host.num_stored > len(host.blocks)
    again = make_request("again", [104] * 16, max_tokens=3)
    result = run(core, again)
    assert host.num_loaded > 0
    assert result.cached["again"] == 12
    assert result.tokens["again"] == alone(again)


def test_statistics_count_what_moved_between_the_tiers() -> None:
    core = make_core(num_blocks=13, num_host_blocks=20)
    run(core, make_request("a", range(30), max_tokens=1))
    before = core.stats()
    assert (before.num_host_blocks, before.host_stores_total, before.host_loads_total) == (20, 0, 0)
    run(core, make_request("b", [90] * 44, max_tokens=1))
    run(core, make_request("c", range(30), max_tokens=1))
    after = core.stats()
    assert (after.host_loads_total, after.num_host_cached_blocks) == (6, after.host_stores_total)


def test_a_snapshot_names_the_tier_of_every_block() -> None:
    core = make_core(num_blocks=4, num_host_blocks=8)
    run(core, make_request("a", range(9), max_tokens=1))
    run(core, make_request("b", [50] * 8, max_tokens=1))
    chain, other = request_hashes(core, 8), hash_tokens([50] * 8, core.config.hash_scheme)
    assert set(core.snapshot_entries()) == {
        SnapshotEntry(chain[0], 0, "gpu"),
        SnapshotEntry(other[0], 0, "gpu"),
        SnapshotEntry(other[1], 0, "gpu"),
        SnapshotEntry(chain[1], 0, "host"),
    }


def union_is_prefix_closed(held: dict[str, set[BlockHash]], chain: list[BlockHash]) -> bool:
    """Tell whether what an index knows of a chain is a prefix of it."""
    known = [any(h in tier for tier in held.values()) for h in chain]
    return known == sorted(known, reverse=True)


def apply_event(held: dict[str, set[BlockHash]], event: KVEvent) -> None:
    """Do what an index does with an event, block by block."""
    match event:
        case BlockStored(block_hashes=hashes, medium=medium):
            held[str(medium)] |= {BlockHash(h) for h in hashes if isinstance(h, bytes)}
        case BlockRemoved(block_hashes=hashes, medium=medium):
            held[str(medium)] -= {BlockHash(h) for h in hashes if isinstance(h, bytes)}


def test_whoever_follows_the_events_sees_a_prefix_closed_union_all_the_time() -> None:
    rng = random.Random(3)
    core = make_core(num_blocks=14, num_host_blocks=9, max_num_seqs=3)
    held: dict[str, set[BlockHash]] = {"GPU": set(), "CPU": set()}
    chains: list[list[BlockHash]] = []
    for i in range(60):
        prompt = [rng.randrange(2) * 50 + j for j in range(rng.randrange(8, 36))]
        chains.append(hash_tokens(prompt, core.config.hash_scheme))
        core.add(make_request(f"r{i}", prompt, max_tokens=2))
        if rng.random() < 0.5:
            core.step()
        for event in core.take_events():
            apply_event(held, event)
            assert all(union_is_prefix_closed(held, chain) for chain in chains)


def test_an_index_predicts_what_is_hit_over_both_tiers() -> None:
    """It hears the events, halves the chain, and finds as much as the engine does."""
    rng = random.Random(5)
    core = make_core(num_blocks=14, num_host_blocks=11, max_num_seqs=3)
    index, target = MemoryIndex(VirtualClock()), Target("replica", 0)
    epoch = index.register(target, boot_ns=1, lease_s=10.0)
    prompts = [[50 * i + j for j in range(32)] for i in range(4)]
    num_restored = 0
    for i in range(80):
        prompt = [*rng.choice(prompts)[: rng.randrange(5, 33)], 255]
        request = Request.admit(make_request("probe", prompt), core.config.hash_scheme, arrival=0)
        batch = EventBatch(0.0, core.take_events(), None)
        index.apply(target, epoch, [SequencedOps(i, index_ops(batch))])
        hit = core.kv_cache.find_hit(request)
        (match,) = index.match(request.chain.hashes)
        most = (len(prompt) - 1) // BLOCK_SIZE
        assert min(match.matched_blocks, most) * BLOCK_SIZE == hit.num_tokens
        num_restored += len(hit.on_host)
        run(core, make_request(f"r{i}", prompt, max_tokens=1))
    assert num_restored > 50


@pytest.mark.parametrize("async_depth", [0, 2])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_every_group_set_gets_its_prefix_back(
    groups: tuple[KVGroupSpec, ...], async_depth: int
) -> None:
    core = make_hybrid_core(groups, num_blocks=44, num_host_blocks=400, async_depth=async_depth)
    request = make_request("a", range(40), max_tokens=4)
    expected = alone_with(groups, request)
    first = run(core, request)
    assert first.tokens["a"] == expected
    for name in ("second", "third"):  # the second leaves states for the third
        unpressed = run(core, make_request(name, range(40), max_tokens=4)).cached[name]
    for i in range(12):
        run(core, make_request(f"churn{i}", [100 + i] * 40, max_tokens=1))
    result = run(core, make_request("b", range(40), max_tokens=4))
    assert result.tokens["b"] == expected
    assert result.cached["b"] == unpressed


def test_the_tail_of_a_coarse_block_is_loaded_into_a_block_of_its_own() -> None:
    groups = (FullAttention(block_size=16), FullAttention())
    core = make_hybrid_core(groups, num_blocks=16, num_host_blocks=40)
    run(core, make_request("a", range(31), max_tokens=1))
    for i in range(3):
        run(core, make_request(f"churn{i}", [100 + i] * 40, max_tokens=1))
    request = make_request("b", [*range(24), 77, 78], max_tokens=4)
    result = run(core, request)
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(groups, request)


def test_states_are_kept_in_the_host_tier_too() -> None:
    groups: tuple[KVGroupSpec, ...] = (LinearState(),)
    core = make_hybrid_core(groups, num_blocks=9, num_host_blocks=20)
    run(core, make_request("a", range(24), max_tokens=1))
    for i in range(9):
        run(core, make_request(f"churn{i}", [100 + i] * 20, max_tokens=1))
    assert core.kv_cache.pool.get_cached(request_hashes(core, 24)[-1]) is None
    request = make_request("b", [*range(24), 99], max_tokens=4)
    result = run(core, request)
    assert result.cached["b"] == 24
    assert result.tokens["b"] == alone_with(groups, request)


def test_without_a_host_tier_nothing_moves() -> None:
    core = make_core(num_blocks=13)
    core.add(make_request("a", range(30), max_tokens=20))
    core.add(make_request("b", range(50, 80), max_tokens=20))
    moves = []
    while core.scheduler.requests:
        step = core.scheduler.schedule()
        moves += step.transfers
        core.scheduler.update_from_output(step, execute(core.executor, step))
    assert moves == []


# Restore or recompute


def test_restoring_is_tried_until_both_speeds_are_known() -> None:
    rates = StepRates()
    cost = RestoreCost(rates)
    assert cost.is_worth_restoring(num_blocks=1000, num_tokens=1)
    cost.observe(num_blocks=10, transfer_s=1.0)
    assert cost.is_worth_restoring(num_blocks=1000, num_tokens=1)
    rates.prefill_tokens_per_s = 100.0
    assert not cost.is_worth_restoring(num_blocks=1000, num_tokens=1)


def test_the_cheaper_side_wins_by_the_speeds_measured() -> None:
    cost = RestoreCost(StepRates(prefill_tokens_per_s=100.0))
    cost.observe(num_blocks=10, transfer_s=2.0)
    assert cost.blocks_per_s == 5.0
    assert cost.is_worth_restoring(num_blocks=5, num_tokens=100)
    assert not cost.is_worth_restoring(num_blocks=6, num_tokens=100)


def test_the_speed_of_transfers_is_smoothed_and_steps_without_any_do_not_count() -> None:
    cost = RestoreCost(StepRates())
    cost.observe(num_blocks=10, transfer_s=1.0)
    cost.observe(num_blocks=20, transfer_s=1.0)
    cost.observe(num_blocks=0, transfer_s=1.0)
    cost.observe(num_blocks=7, transfer_s=0.0)
    assert cost.blocks_per_s == 12.0


@pytest.mark.parametrize(("per_moved_block_s", "cached"), [(0.0001, 28), (1.0, 0)])
def test_an_engine_recomputes_when_its_transfers_are_slower_than_its_prefill(
    per_moved_block_s: float, cached: int
) -> None:
    clock = VirtualClock()
    cost = StepCost(per_prefill_token_s=0.001, per_moved_block_s=per_moved_block_s)
    config = make_core(num_blocks=13, num_host_blocks=30).config
    executor = ScriptedExecutor(
        num_blocks=13, block_size=BLOCK_SIZE, cost=cost, sleep=clock.advance
    )
    core = EngineCore(config, executor, clock)
    run(core, make_request("a", range(30), max_tokens=1))
    for i in range(3):
        run(core, make_request(f"churn{i}", [100 + i] * 40, max_tokens=1))
    assert core.rates.prefill_tokens_per_s == pytest.approx(1000.0)
    request = make_request("b", range(30), max_tokens=4)
    result = run(core, request)
    assert result.cached["b"] == cached
    assert result.tokens["b"] == alone(request)


# Order of moves


def test_moves_survive_the_wire() -> None:
    moves: list[BlockTransfer] = [HostStore(1, 7), HostLoad(7, 2), BlockCopy(2, 3)]
    encoded = msgspec.msgpack.encode(moves)
    assert msgspec.msgpack.decode(encoded, type=list[BlockTransfer]) == moves


def test_moves_of_one_step_are_carried_out_in_the_order_of_their_decision() -> None:
    """A block is stored, its host block loaded elsewhere, and the loaded one copied: 1 -> 3."""
    executor = ScriptedExecutor(num_blocks=4, block_size=BLOCK_SIZE)
    core = EngineCore(make_core(num_blocks=4).config, executor, VirtualClock())
    core.add(make_request("a", range(5), max_tokens=1))
    first = core.scheduler.schedule()
    execute(executor, first)
    (table,) = first.new_requests[0].block_ids
    moves: list[BlockTransfer] = [HostStore(table[0], 7), HostLoad(7, 2), BlockCopy(2, 3)]
    request = make_request("b", range(5), max_tokens=1)
    step = core.scheduler.schedule()
    new = first.new_requests[0]
    moved = msgspec.structs.replace(
        step,
        dropped_request_ids=["a"],
        new_requests=[
            msgspec.structs.replace(new, request_id="b", num_computed_tokens=4, block_ids=[[3, 1]])
        ],
        num_scheduled_tokens={"b": 1},
        num_computed_tokens={"b": 4},
        transfers=moves,
    )
    assert execute(executor, moved).sampled_token_ids["b"] == alone(request)
