"""With any set of cache groups, tokens are those of the same request run alone and uncached.

The scripted executor reads each group as a model would: a window only its window, a state only
its state. A wrong, stale, missing or too early freed block would show.
"""

from __future__ import annotations

import random

import pytest

from engine.kv_groups.group import InFlight, resolve_groups
from engine.kv_groups.spec import KVGroupSpec
from tests.engine.build import BLOCK_SIZE, make_request, run
from tests.engine.hybrid import GROUPS, alone_with, make_hybrid_core

each_group_set = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


@each_group_set
@pytest.mark.parametrize("budget", [5, 64])
def test_every_hit_length_gives_the_same_tokens(
    groups: tuple[KVGroupSpec, ...], budget: int
) -> None:
    prompt = list(range(37))
    request = make_request("a", prompt, max_tokens=12)
    expected = alone_with(groups, request)
    for num_shared in range(len(prompt) + 1):
        core = make_hybrid_core(groups, budget=budget)
        warm = make_request("warm", [*prompt[:num_shared], 99], max_tokens=3)
        run(core, warm)
        result = run(core, request)
        assert result.cached["a"] <= num_shared
        assert result.tokens["a"] == expected


@each_group_set
def test_siblings_of_a_burst_compute_their_prefix_once(groups: tuple[KVGroupSpec, ...]) -> None:
    core = make_hybrid_core(groups, num_blocks=512, budget=16)
    shared = list(range(8 * BLOCK_SIZE))
    requests = [make_request(f"r{i}", [*shared, *[100 + i] * 6]) for i in range(16)]
    result = run(core, *requests)
    assert result.tokens == {r.request_id: alone_with(groups, r) for r in requests}
    num_drafted = BLOCK_SIZE if any(getattr(spec, "drafter", False) for spec in groups) else 0
    hit = len(shared) - num_drafted
    assert [result.cached[f"r{i}"] for i in range(16)] == [0] + [hit] * 15


@pytest.mark.parametrize("async_depth", [0, 2])
@each_group_set
def test_pressure_with_preemption_loses_nothing(
    groups: tuple[KVGroupSpec, ...], async_depth: int
) -> None:
    """The pool holds the longest request and a bit. States never take more than was reserved."""
    rng = random.Random(11)
    resolved = resolve_groups(groups, hash_block_size=BLOCK_SIZE)
    ahead = InFlight(max_step_tokens=12, num_steps=1 + async_depth)
    num_blocks = 5 + sum(group.max_held_blocks(46, ahead) for group in resolved)
    core = make_hybrid_core(
        groups,
        num_blocks=num_blocks,
        budget=12,
        max_num_seqs=5,
        max_preemptions=2,
        async_depth=async_depth,
    )
    requests = []
    for i in range(30):
        shared = [(40 * (i % 3) + j) % 256 for j in range(rng.randrange(1, 16))]
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 8))]
        requests.append(
            make_request(
                f"r{i}",
                shared + own,
                max_tokens=rng.randrange(8, 24),
                temperature=rng.choice([0.0, 1.0]),
                seed=i,
            )
        )
    result = run(core, *requests)
    assert core.counters.preemptions > 0 or all(group.is_state for group in resolved)
    assert result.tokens == {r.request_id: alone_with(groups, r) for r in requests}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable
