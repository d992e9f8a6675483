"""Decode steps taken in one go equal the scheduler's own steps, in everything that can be seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from sim.latency import LatencyModel
from sim.virtual_replica import VirtualReplica
from tests.sim.replaying import BLOCK_SIZE, arrivals, row

LATENCY = LatencyModel(
    name="test",
    base_s=0.01,
    per_prefill_token_s=0.001,
    per_prefill_pair_s=0.00001,
    per_decode_s=0.0001,
    per_context_token_s=0.000003,
)

requests = st.lists(
    st.tuples(
        st.floats(0, 3, allow_nan=False, width=16),  # seconds after the one before
        st.integers(0, 3),  # which family of prefixes
        st.integers(0, 5),  # blocks of prompt
        st.integers(1, 80),  # tokens of answer
    ),
    min_size=1,
    max_size=12,
)


def seen(drawn: list[tuple[float, int, int, int]], num_blocks: int, *, fast: bool) -> Any:
    """Run the requests on one replica; return everything that it shows."""
    engine = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=32, max_step_s=0.3, check_integrity=True
    )
    replica = VirtualReplica(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        engine=engine,
        latency=LATENCY,
        fast=fast,
    )
    at_s = 0.0
    rows = []
    for line, (gap_s, family, count, output) in enumerate(drawn, start=1):
        at_s += gap_s
        ids = [family * 100 + i for i in range(count)]
        rows.append(row(line, at_s, ids, output_length=output))
    results = []
    for arrival in arrivals(rows):
        results += list(replica.advance(arrival.at_s))
        replica.add(arrival, arrival.at_s)
    results += list(replica.advance(float("inf")))
    core = replica.core
    return {
        "ends": [
            (r.end_s, o.request_id, o.finish_reason, o.num_cached_tokens)
            for r in results
            for o in r.outputs
            if o.finish_reason is not None or o.num_cached_tokens is not None
        ],
        "events": [(r.end_s, r.events) for r in results if r.events],
        "cached": sorted(core.kv_cache.pool.cached_hashes()),
        "evictions": core.kv_cache.pool.num_evictions,
        "counters": core.counters,
        "rates": core.rates,
        "steps": core.scheduler.step,
    }


@settings(max_examples=30, deadline=None)
@given(drawn=requests, num_blocks=st.sampled_from([12, 20, 64]))
def test_it_equals_step_by_step(drawn: list[tuple[float, int, int, int]], num_blocks: int) -> None:
    assert seen(drawn, num_blocks, fast=True) == seen(drawn, num_blocks, fast=False)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(drawn=requests, num_blocks=st.sampled_from([12, 16, 20, 32, 64]))
def test_it_equals_step_by_step_at_length(
    drawn: list[tuple[float, int, int, int]], num_blocks: int
) -> None:
    assert seen(drawn, num_blocks, fast=True) == seen(drawn, num_blocks, fast=False)
