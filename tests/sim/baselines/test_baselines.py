"""Each baseline follows the formula that it is named after."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvindex.foundation.errors import ConfigError
from sim.baselines.approximate_tree import ApproximateTree
from sim.baselines.registry import build_baseline
from sim.baselines.types import Baseline, Query, Worker

A, B, C = b"a", b"b", b"c"


def query(number: int, hashes: Sequence[bytes], session: str | None = None) -> Query:
    """Return a request of 16-token blocks and nothing else."""
    return Query(number, f"r{number}", hashes, 16 * len(hashes), 16, session)


def workers(*active: int, matched: Sequence[int] = (0, 0, 0)) -> list[Worker]:
    """Return replicas with so many running requests each."""
    return [Worker(f"replica-{i}", n, matched[i]) for i, n in enumerate(active)]


def choices(baseline: Baseline, count: int) -> list[int]:
    return [baseline.choose(query(i, [bytes([i])]), workers(0, 0, 0)) for i in range(count)]


def test_hash_of_prefix_sends_equal_beginnings_to_one_replica() -> None:
    policy = build_baseline("hash_of_prefix", {"prefix_tokens": 32})
    idle = workers(9, 0, 0)
    same = {policy.choose(query(i, [A, B, bytes([i])]), idle) for i in range(20)}
    assert len(same) == 1
    assert set(choices(policy, 60)) == {0, 1, 2}


def test_sticky_session_goes_by_the_session_and_survives_a_lost_replica() -> None:
    policy = build_baseline("sticky_session", {})
    fleet = workers(0, 0, 0)
    before = [policy.choose(query(i, [A], f"s{i}"), fleet) for i in range(30)]
    again = [policy.choose(query(i + 100, [B], f"s{i}"), fleet) for i in range(30)]
    assert before == again
    left = [policy.choose(query(i, [A], f"s{i}"), fleet[:2]) for i in range(30)]
    assert all(now == then for now, then in zip(left, before, strict=True) if then < 2)


def test_greedy_prefix_ignores_load() -> None:
    policy = build_baseline("greedy_prefix", {})
    assert policy.choose(query(0, [A, B]), workers(99, 0, 0, matched=(2, 1, 0))) == 0


def test_random_is_a_function_of_the_seed() -> None:
    seeded = [choices(build_baseline("random", {"seed": seed}), 40) for seed in (0, 0, 1)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_sglang_follows_the_match_above_its_threshold() -> None:
    policy = build_baseline("sglang_cache_aware", {"cache_threshold": 0.5})
    policy.choose(query(0, [A, B, C]), workers(0, 1, 1))
    assert policy.choose(query(1, [A, B, b"x"]), workers(9, 0, 0)) == 0
    assert policy.choose(query(2, [A, b"y", b"z"]), workers(9, 0, 1)) == 1


def test_sglang_takes_the_least_loaded_when_out_of_balance() -> None:
    policy = build_baseline("sglang_cache_aware", {"balance_abs_threshold": 4})
    policy.choose(query(0, [A, B]), workers(0, 1, 1))
    assert policy.choose(query(1, [A, B]), workers(5, 1, 2)) == 0
    assert policy.choose(query(2, [A, B]), workers(6, 1, 2)) == 1
    # Difference above 4, but 10 is not more than 1.5 times 7.
    assert policy.choose(query(3, [A, B]), workers(12, 7, 9)) == 1


def test_production_stack_takes_the_deepest_holder_whatever_its_load() -> None:
    policy = build_baseline("production_stack", {})
    first = policy.choose(query(0, [A, B]), workers(0, 0, 0))
    active = [0, 0, 0]
    active[first] = 99
    assert policy.choose(query(1, [A, B, C]), workers(*active)) == first


def test_production_stack_load_weighs_load_by_beta() -> None:
    def second(beta: float) -> int:
        policy = build_baseline("production_stack_load", {"beta": beta})
        first = policy.choose(query(0, [A, B]), workers(0, 9, 9))
        assert first == 0
        return policy.choose(query(1, [A, B]), workers(4, 1, 1))

    # mean 2: replica 0 scores 1 - beta, replica 1 beta / 2.
    assert second(0.5) == 0
    assert second(0.9) in (1, 2)


def test_an_approximate_tree_forgets_its_leaves_first() -> None:
    tree = ApproximateTree(max_blocks=3)
    tree.insert("w", [A, B])
    tree.insert("w", [A, C])
    assert tree.num_matched("w", [A, C]) == 2
    tree.insert("w", [b"x"])
    assert tree.num_matched("w", [A, B]) == 1
    assert tree.num_matched("w", [A, C]) == 2
    assert tree.num_matched("other", [A]) == 0


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="policy 'sticky': there is none"):
        build_baseline("sticky", {})
    with pytest.raises(ConfigError, match="it takes: cache_threshold"):
        build_baseline("sglang_cache_aware", {"threshold": 0.5})
