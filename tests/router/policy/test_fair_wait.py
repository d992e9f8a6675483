"""Requests that wait for a target: whose turn it is, and for how long at most."""

from __future__ import annotations

import pytest

from router.policy.types import Place, Shed, Wait
from tests.router.policy.build import ask, planner, view
from tests.router.policy.virtual_fleet import VirtualFleet, virtual_fleet


def flood(fleet: VirtualFleet, tenant: str, count: int, num_tokens: int, **fields: object) -> None:
    for i in range(count):
        fleet.arrive(f"{tenant}{i}", tenant, num_tokens, **fields)


def test_without_a_queue_nothing_ever_waits() -> None:
    plan = planner().plan(ask(), [view("x", reserved_prefill_tokens=50_000)], 0.0)
    assert isinstance(plan, Place)


@pytest.mark.fault("router-56")
def test_a_short_request_does_not_wait_behind_anothers_flood() -> None:
    """It waits for a target to accept, and then for less than `accept_s` of reserved work."""
    fleet = virtual_fleet("x", accept_s=2.0, max_wait_s=1000.0)
    flood(fleet, "a", 100, 1000)
    fleet.run(until=3.5)
    fleet.now = 3.5
    assert len(fleet.order) == 5  # Two at once, and one with each that is done.
    fleet.arrive("b0", "b", 100)
    fleet.run()
    assert fleet.order[5] == "b0"
    short = fleet.served["b0"]
    assert short.placed_at == 4.0
    assert short.first_token_at == pytest.approx(5.1)
    ends = [served.first_token_at for served in fleet.served.values()]
    assert max(end for end in ends if end is not None) == pytest.approx(100.1)  # Never idle.
    assert None not in ends


@pytest.mark.fault("router-56")
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_backlogged_tenants_are_served_tokens_in_proportion_to_their_weights(
    weights: tuple[float, float],
) -> None:
    fleet = virtual_fleet("x", accept_s=1.0)
    flood(fleet, "a", 60, 500, weight=weights[0])
    flood(fleet, "b", 300, 100, weight=weights[1])
    fleet.run(until=20.0)
    tokens = {
        tenant: sum(num for name, num in (("a", 500), ("b", 100)) if name == tenant)
        * sum(1 for request_id in fleet.order if request_id.startswith(tenant))
        for tenant in "ab"
    }
    share = tokens["a"] / (tokens["a"] + tokens["b"])
    # Off by at most one quantum and one request of either.
    assert abs(share - weights[0] / sum(weights)) < 0.08, tokens


def test_cached_tokens_count_a_tenth_of_computed_ones() -> None:
    fleet = virtual_fleet("x", accept_s=0.5)
    for i in range(60):
        fleet.matched[f"a{i}"] = {"x": 1000}
    flood(fleet, "a", 60, 961)
    flood(fleet, "b", 60, 961)
    fleet.run(until=10.0)
    counts = [sum(1 for r in fleet.order if r.startswith(tenant)) for tenant in "ab"]
    # 1 + 0.1 * 960 against 961: nearly ten of one for one of the other, once both wait.
    assert counts[0] == 60
    assert 6 <= counts[1] <= 12


@pytest.mark.fault("router-51")
def test_a_low_priority_progresses_by_its_floor_while_the_high_one_is_always_full() -> None:
    fleet = virtual_fleet("x", accept_s=0.2, floor_share=0.1)
    flood(fleet, "a", 300, 100, priority=0)
    flood(fleet, "b", 100, 100, priority=5)
    fleet.run(until=20.0)
    low = sum(1 for request_id in fleet.order if request_id.startswith("b"))
    assert len(fleet.order) == pytest.approx(200, abs=4)
    assert low == pytest.approx(len(fleet.order) * 0.1 / 1.1, abs=2)


@pytest.mark.fault("router-51")
def test_without_a_floor_priorities_are_strict() -> None:
    fleet = virtual_fleet("x", accept_s=0.2, floor_share=0.0)
    flood(fleet, "a", 100, 100, priority=5)
    flood(fleet, "b", 100, 100, priority=0)
    fleet.run(until=5.0)
    assert [r[0] for r in fleet.order[2:40]] == ["b"] * 38


def test_a_tenant_in_debt_waits_for_the_rounds_that_it_used_up() -> None:
    fleet = virtual_fleet("x", accept_s=0.1)
    flood(fleet, "a", 3, 5000)
    flood(fleet, "b", 30, 250)
    fleet.run()
    # One long one cost five quanta: the others get four each before the next.
    between = fleet.order[fleet.order.index("a1") + 1 : fleet.order.index("a2")]
    assert 16 <= len(between) <= 24
    assert {request_id[0] for request_id in between} == {"b"}


def test_a_full_queue_and_a_passed_deadline_are_shed_with_a_time_to_come_back() -> None:
    fleet = virtual_fleet("x", accept_s=1.0, max_waiting=2, max_wait_s=3.0)
    flood(fleet, "a", 4, 10_000)
    assert [type(fleet.served[f"a{i}"].decision) for i in range(4)] == [Place, Wait, Wait, Shed]
    refused = fleet.served["a3"].decision
    assert isinstance(refused, Shed)
    assert refused.retry_after_s == pytest.approx(3.0)  # The deadline of those who wait.
    fleet.arrive("b0", "b", 100)  # Another tenant's queue is not full.
    assert isinstance(fleet.served["b0"].decision, Wait)
    fleet.run(until=3.0)
    assert {type(fleet.served[name].decision) for name in ("a1", "a2", "b0")} == {Shed}
    assert fleet.planner.num_waiting("m") == 0


def test_a_request_waits_for_the_warm_target_when_that_serves_it_earlier() -> None:
    fleet = virtual_fleet("x", "y", accept_s=1.0)
    fleet.matched["busy"] = {"x": 1}  # So that it goes to x.
    fleet.arrive("busy", "a", 1500)
    fleet.matched["warm"] = {"x": 600}
    fleet.arrive("warm", "a", 9700)
    waiting = fleet.served["warm"].decision
    assert isinstance(waiting, Wait)
    assert waiting.reason == "affinity"
    assert waiting.until == pytest.approx(0.484)  # When x has less than a second before it.
    fleet.arrive("cold", "b", 100)  # Who has nothing to wait for does not.
    assert fleet.served["cold"].placed_at == 0.0
    fleet.run()
    warm = fleet.served["warm"]
    assert warm.decision is not None
    assert isinstance(warm.decision, Place)
    assert warm.decision.winner.target.replica == "x"


def test_whoever_leaves_gives_the_turn_away() -> None:
    fleet = virtual_fleet("x", accept_s=1.0)
    flood(fleet, "a", 4, 2000)
    fleet.planner.leave("m", "a1")
    fleet.run()
    assert fleet.order == ["a0", "a2", "a3"]
    assert fleet.planner.num_waiting("m") == 0


def test_a_request_that_only_one_target_can_serve_holds_up_nobody_else() -> None:
    plan = virtual_fleet("x", accept_s=1.0).planner
    targets = [view("x", max_model_len=100), view("y", reserved_prefill_tokens=5000)]
    choosy = plan.plan(ask("long", 200, tenant="a"), targets, 0.0)
    assert isinstance(choosy, Wait)
    assert choosy.reason == "full"
    assert isinstance(plan.plan(ask("short", 50, tenant="a"), targets, 0.0), Place)


def test_a_second_attempt_does_not_wait_again() -> None:
    plan = virtual_fleet("x", accept_s=1.0).planner
    targets = [view("x", reserved_prefill_tokens=5000), view("y")]
    retry = ask("q", tenant="a", attempt=2, tried=frozenset({"y"}))
    assert isinstance(plan.plan(retry, targets, 0.0), Place)
