"""Room in a target's KV cache: what runs holds it, what is lost meanwhile, what it costs."""

from __future__ import annotations

import pytest

from router.policy.planner import Planner
from router.policy.types import Candidate, Place, PlanRequest, TargetView
from tests.router.policy.build import ask, planner, view, views, winner

PROMPT = 801
"""50 blocks and one token."""


def candidate(plan: Planner, request: PlanRequest, target: TargetView) -> Candidate:
    """Return how the planner sees a target that is the only one."""
    place = plan.plan(request, [target], 10.0)
    assert isinstance(place, Place)
    return place.winner


def busy_planner(*, answered: bool = False) -> Planner:
    """Return a planner that has 1,300 tokens running at `a`, where a request takes 4 s."""
    plan = planner()
    if answered:
        plan.plan(ask("before", 17), views("a"), 0.0)
        plan.finish("before", 1, "answered", 4.0, num_output_tokens=20)
    plan.plan(ask("running", 1300), views("a"), 10.0)
    plan.first_token("running", 1)
    return plan


def test_a_prompt_that_fits_beside_what_runs_keeps_its_prefix() -> None:
    found = candidate(busy_planner(), ask(num_tokens=PROMPT), view("a", matched_blocks=50))
    assert (found.num_cached_tokens, found.num_reusable_tokens, found.memory_s) == (800, 800, 0.0)
    target = view("a", matched_blocks=50, kv_tokens=4000)
    found = candidate(busy_planner(), ask(num_tokens=PROMPT), target)
    assert (found.num_cached_tokens, found.num_reusable_tokens, found.memory_s) == (800, 800, 0.0)


def test_a_prompt_that_has_to_wait_for_memory_finds_only_what_running_requests_hold() -> None:
    """1,300 run, 801 come, and of 2,000 a tenth is never free: 301 are lacking."""
    target = view("a", matched_blocks=50, kv_tokens=2000)
    found = candidate(busy_planner(), ask(num_tokens=PROMPT), target)
    assert (found.num_cached_tokens, found.num_reusable_tokens) == (800, 0)
    assert found.num_uncached_tokens == PROMPT
    sibling = tuple(f"running:{i}".encode() for i in range(40))
    request = ask(num_tokens=1500, hashes=(*sibling, *(b"own %d" % i for i in range(53))))
    found = candidate(busy_planner(), request, view("a", matched_blocks=93, kv_tokens=2000))
    assert found.num_reusable_tokens == 640  # 1,300 run, and 860 of 1,500 are not among them.


def test_the_wait_for_memory_is_as_long_as_that_share_of_the_cache_takes_to_turn_over() -> None:
    """Of outputs, 20 tokens are expected of each: 1,300 + 20 + 801 + 20 - 1,800 of 2,000 lack."""
    found = candidate(
        busy_planner(answered=True), ask(num_tokens=PROMPT), view("a", kv_tokens=2000)
    )
    assert found.memory_s == pytest.approx(341 / 2000 * 4.0)
    assert found.expected_s == pytest.approx(found.memory_s + PROMPT / 1000)


def test_a_conversation_leaves_a_target_whose_memory_is_full_for_one_that_has_room() -> None:
    target = view("a", matched_blocks=50, kv_tokens=2000)
    for free, expected in ((view("b", kv_tokens=2000), "b"), (view("b", draining=True), "a")):
        assert winner(busy_planner().plan(ask(num_tokens=PROMPT), [target, free], 10.0)) == expected
    roomy = view("a", matched_blocks=50, kv_tokens=4000)
    plan = busy_planner()
    assert (
        winner(plan.plan(ask(num_tokens=PROMPT), [roomy, view("b", kv_tokens=4000)], 10.0)) == "a"
    )


def test_what_other_gateways_reserved_counts_as_far_as_the_target_says_that_it_is_held() -> None:
    """Their 200 blocks may be the same 3,200 tokens many times over."""
    known = {"matched_blocks": 50, "kv_tokens": 2000, "num_reserved_blocks": 200}
    found = candidate(planner(), ask(num_tokens=PROMPT), view("a", kv_usage=0.1, **known))
    assert found.num_reusable_tokens == 800
    found = candidate(planner(), ask(num_tokens=PROMPT), view("a", kv_usage=0.6, **known))
    assert found.num_reusable_tokens == 0


def test_an_idle_target_has_room_for_any_prompt_that_it_can_hold() -> None:
    found = candidate(
        planner(), ask(num_tokens=1950), view("a", matched_blocks=100, kv_tokens=2000)
    )
    assert (found.num_reusable_tokens, found.memory_s) == (1600, 0.0)


def test_blocks_that_several_requests_share_are_held_once_and_given_back_with_the_last() -> None:
    plan = planner()
    account = plan.ledger.account
    shared = tuple(f"system:{i}".encode() for i in range(10))
    target = views("a")[0].target
    held = []
    for name in ("x", "y"):
        plan.plan(ask(name, 181, hashes=(*shared, name.encode())), views("a"), 0.0)
        held.append(account(target).num_held_tokens)
    for name in ("x", "y"):
        plan.finish(name, 1, "answered", 1.0)
        held.append(account(target).num_held_tokens)
    assert held == [181, 181 + 21, 181, 0]
