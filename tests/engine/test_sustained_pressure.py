"""Ten thousand random requests on a pool that holds three of them: nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from engine.core import EngineCore
from engine.kv_groups.spec import FullAttention, KVGroupSpec, SlidingWindow
from engine.messages import EngineRequest
from tests.engine.build import Run, make_request
from tests.engine.hybrid import make_hybrid_core

NUM_REQUESTS = 10_000
MAX_LIVE = 24
LONGEST = 40

FULL: tuple[KVGroupSpec, ...] = (FullAttention(),)
HYBRID: tuple[KVGroupSpec, ...] = (FullAttention(block_size=8), SlidingWindow(window=6))


def traffic() -> Iterator[EngineRequest]:
    """Yield requests of five families of prompts, of up to `LONGEST` tokens with their answers."""
    rng = random.Random(2024)
    for i in range(NUM_REQUESTS):
        family = rng.randrange(5)
        shared = [(50 * family + j) % 256 for j in range(rng.randrange(0, 20))]
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 9))]
        tenant = rng.choice(["a", "b", "c"])
        yield make_request(
            f"r{i}",
            shared + own,
            max_tokens=rng.randrange(1, LONGEST - 28),
            tenant=tenant,
            salt=rng.choice([None, tenant]),
            priority=rng.randrange(3),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
        )


def serve(core: EngineCore) -> Run:
    """Run all of the traffic, never more than `MAX_LIVE` requests at a time."""
    result = Run(core)
    for request in traffic():
        while len(core.scheduler.requests) >= MAX_LIVE:
            result.step()
        core.add(request)
    return result.to_end()


@cache
def unpressed(groups: tuple[KVGroupSpec, ...]) -> dict[str, list[int]]:
    """Return the tokens of the same traffic, uncached and with room for all."""
    core = make_hybrid_core(
        groups, num_blocks=1200, caching=False, max_num_seqs=24, check_integrity=False
    )
    return serve(core).tokens


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("groups", "num_blocks", "num_host_blocks", "async_depth", "policy"),
    [(FULL, 31, 0, 0, "fair"), (FULL, 31, 60, 2, "priority"), (HYBRID, 37, 40, 1, "fair")],
)
def test_ten_thousand_requests_on_a_pool_for_three_all_get_their_tokens(
    groups: tuple[KVGroupSpec, ...],
    num_blocks: int,
    num_host_blocks: int,
    async_depth: int,
    policy: str,
) -> None:
    core = make_hybrid_core(
        groups,
        num_blocks=num_blocks,
        budget=24,
        max_num_seqs=8,
        num_host_blocks=num_host_blocks,
        async_depth=async_depth,
        policy=policy,
        kv_shares={"a": 0.3},
    )
    result = serve(core)
    assert result.tokens == unpressed(groups)
    assert core.counters.preemptions > 100
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable
    if num_host_blocks:
        assert core.kv_cache.pool.host is not None
        assert core.kv_cache.pool.host.num_loaded > 1000
