"""The bounds against block-by-block caches that are too simple to be wrong."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.oracle.belady import Belady
from sim.oracle.bounds import (
    by_session,
    by_tenant,
    capacity_bounds,
    infinite_cache,
    infinite_hit_blocks,
    pooled,
)
from sim.oracle.lru import doubling_capacities, lru_curve
from sim.oracle.reuse import Run, reuse_of
from sim.traces.row import TraceRow
from tests.sim.traces.samples import CONVERSATION_1000, sample, trace_rows

Chain = tuple[int, ...]


def chains_of(paths: list[list[int]]) -> list[Chain]:
    """Turn branch choices into chains: one id per distinct path."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        tuple(ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path)))
        for path in paths
    ]


TRAFFIC = st.lists(
    st.lists(st.integers(0, 1), min_size=0, max_size=6), min_size=1, max_size=25
).map(chains_of)


def lru_hits(chains: list[Chain], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for chain in chains:
        for block in chain:
            if block not in cache:
                break
            num_hits += 1
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_hits


def belady_hits(chains: list[Chain], capacity: int) -> int:
    cache: set[int] = set()
    num_hits = 0
    for index, chain in enumerate(chains):
        num_hits += sum(block in cache for block in chain)
        depth = {block: d for later in chains for d, block in enumerate(later)}
        next_use = {
            block: next((i for i in range(index + 1, len(chains)) if block in chains[i]), None)
            for block in cache.union(chain)
        }
        wanted = [(use, depth[block], block) for block, use in next_use.items() if use is not None]
        cache = {block for _, _, block in sorted(wanted)[:capacity]}
    return num_hits


@settings(max_examples=60, deadline=None)
@given(chains=TRAFFIC, capacity=st.integers(1, 20))
def test_one_pass_gives_what_a_real_lru_cache_hits(chains: list[Chain], capacity: int) -> None:
    reuse = reuse_of(trace_rows(*chains), block_size=4)
    curve = lru_curve(reuse)
    assert sum(curve.row_hits(capacity)) == curve.hit_blocks(capacity) == lru_hits(chains, capacity)


@settings(max_examples=60, deadline=None)
@given(chains=TRAFFIC, capacity=st.integers(1, 20))
def test_moving_runs_gives_what_a_clairvoyant_cache_hits(
    chains: list[Chain], capacity: int
) -> None:
    reuse = reuse_of(trace_rows(*chains), block_size=4)
    assert Belady(reuse).hit_blocks(capacity) == belady_hits(chains, capacity)


@settings(max_examples=60, deadline=None)
@given(chains=TRAFFIC)
def test_the_infinite_bound_is_membership_in_a_set(chains: list[Chain]) -> None:
    seen: set[int] = set()
    expected = []
    for chain in chains:
        expected.append(sum(block in seen for block in chain))
        seen.update(chain)
    assert infinite_hit_blocks(trace_rows(*chains), block_size=4) == tuple(expected)


def test_the_infinite_bound_of_a_recorded_trace_is_membership_in_a_set() -> None:
    seen: set[int] = set()
    num_hits = 0
    for row in sample(CONVERSATION_1000).rows():
        assert row.hash_ids is not None
        num_hits += len(seen.intersection(row.hash_ids))
        seen.update(row.hash_ids)
    reuse = reuse_of(sample(CONVERSATION_1000).rows(), block_size=512)
    assert infinite_cache(reuse).hit_blocks == num_hits
    assert reuse.num_unique_blocks == len(seen)


def test_belady_is_never_below_lru_and_both_end_at_the_infinite_bound() -> None:
    reuse = reuse_of(sample(CONVERSATION_1000).rows(), block_size=512)
    capacities = doubling_capacities(reuse.num_unique_blocks)
    bounds = capacity_bounds(reuse, capacities)
    assert all(bound.belady_hit_blocks >= bound.lru_hit_blocks for bound in bounds)
    limit = infinite_cache(reuse).hit_blocks
    assert (bounds[-1].lru_hit_blocks, bounds[-1].belady_hit_blocks) == (limit, limit)


def test_pooled_replicas_are_one_cache_of_their_blocks() -> None:
    reuse = reuse_of(sample(CONVERSATION_1000).rows(), block_size=512)
    bound = pooled(reuse, replicas=8, blocks=1024)
    assert bound == capacity_bounds(reuse, [8192])[0]
    assert bound.lru_hit_blocks == 4336


def test_runs_name_the_last_request_that_used_a_block() -> None:
    reuse = reuse_of(trace_rows((1, 2, 3), (1, 2, 4), (1,), (1, 2, 3, 5)), block_size=4)
    assert reuse.runs[1] == (Run(owner=0, num_blocks=2),)
    assert reuse.runs[3] == (Run(2, 1), Run(1, 1), Run(0, 1))
    assert reuse.num_hit_blocks == [0, 2, 1, 3]


def in_session(row: TraceRow, session_id: str | None, tenant: str | None = None) -> TraceRow:
    return msgspec.structs.replace(row, session_id=session_id, tenant=tenant)


def test_sessions_and_tenants_of_their_own_share_nothing() -> None:
    first, second, third, fourth = trace_rows((1, 2), (1, 2), (1, 2), (1, 2))
    rows = [
        in_session(first, "s1", "a"),
        in_session(second, "s2", "a"),
        in_session(third, "s1", "b"),
        in_session(fourth, None, "b"),
    ]
    assert infinite_hit_blocks(rows, block_size=4) == (0, 2, 2, 2)
    assert infinite_hit_blocks(rows, block_size=4, namespace=by_session) == (0, 0, 2, 0)
    assert infinite_hit_blocks(rows, block_size=4, namespace=by_tenant) == (0, 2, 0, 2)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    bound = infinite_cache(reuse_of(trace_rows((1, 2), (1, 2)), block_size=4))
    assert (bound.hit_blocks, bound.hit_tokens, bound.capped_hit_blocks) == (2, 8, 1)


def test_a_hit_in_a_partial_block_counts_the_tokens_that_are_there() -> None:
    rows = [
        TraceRow(line=i, arrival_s=0.0, input_length=5, output_length=1, hash_ids=(1, 2))
        for i in (1, 2)
    ]
    assert infinite_cache(reuse_of(rows, block_size=4)).hit_tokens == 5


def test_without_references_rates_are_unknown_not_zero() -> None:
    rows = [TraceRow(line=1, arrival_s=0.0, input_length=9, output_length=1)]
    reuse = reuse_of(rows, block_size=4)
    assert infinite_cache(reuse).block_hit is None
    assert (lru_curve(reuse).hit_blocks(16), Belady(reuse).hit_blocks(16)) == (0, 0)
    with pytest.raises(ValueError, match="no block is used twice"):
        lru_curve(reuse).reuse_distance(0.5)


def test_capacities_double_until_everything_fits() -> None:
    assert doubling_capacities(1) == [16]
    assert doubling_capacities(17) == [16, 32]
    assert doubling_capacities(64) == [16, 32, 64]
