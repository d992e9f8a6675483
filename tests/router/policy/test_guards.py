"""What the planner does beside scores: saturation, copies of hot prefixes, bounds on siblings."""

from __future__ import annotations

from typing import Any

import pytest

from router.policy.choice import replayed
from router.policy.planner import Planner, PlannerConfig
from router.policy.quarantine import Quarantine
from router.policy.registry import build_policy
from router.policy.replication import ReplicationConfig
from router.policy.retry_budget import RetryBudget
from router.policy.types import Place, PlanRequest
from tests.router.policy.build import ask, planner, view, views, winner

SHARED = tuple(f"shared:{i}".encode() for i in range(64))


def guarded(policy: str = "prefix_cost", **config: Any) -> Planner:
    params = {"decode_horizon_tokens": 0.0} if policy == "prefix_cost" else {}
    policies = {"t": build_policy(policy, params, owner="test")}
    return Planner(policies, config=PlannerConfig(**config), gateway="gw")


def shared(request_id: str) -> PlanRequest:
    """A request whose first 1024 tokens are everybody's, and 64 its own."""
    own = tuple(f"{request_id}:{i}".encode() for i in range(4))
    return ask(request_id, 1089, hashes=SHARED + own)


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        ({"a": 1300, "b": 0, "c": 0}, "b"),  # Somebody is idle: the score decides.
        ({"a": 1900, "b": 1500, "c": 1200}, "a"),  # Nobody is: stay with the prefix.
        ({"a": 2500, "b": 1500, "c": 1200}, "b"),  # It is twice as busy: next to it.
    ],
)
def test_affinity_is_kept_when_everyone_is_full(queued: dict[str, int], expected: str) -> None:
    matched = {"a": 10, "b": 4, "c": 0}
    targets = [
        view(name, matched_blocks=matched[name], reserved_prefill_tokens=tokens)
        for name, tokens in queued.items()
    ]
    plan = guarded(saturation_s=1.0).plan(ask(num_tokens=200), targets, 0.0)
    assert winner(plan) == expected
    assert isinstance(plan, Place)
    assert plan.rule == ("score" if expected == "b" and queued["b"] == 0 else "affinity")


def test_a_policy_that_ignores_the_cache_has_no_affinity_to_keep() -> None:
    targets = [
        view("a", matched_blocks=10, reserved_prefill_tokens=3000, num_reserved=3),
        view("b", reserved_prefill_tokens=2000, num_reserved=2),
    ]
    assert winner(guarded("least_load", saturation_s=1.0).plan(ask(), targets, 0.0)) == "b"


@pytest.mark.fault("router-21")
def test_a_hot_prefix_is_given_to_more_targets_on_purpose_and_not_too_often() -> None:
    hot = ReplicationConfig(requests_per_copy=9.5, half_life_s=1e9, min_tokens=512, every_s=5.0)
    plan = guarded(replication=hot)
    holders = {"a"}
    copies = []
    for i in range(60):
        targets = [view(n, matched_blocks=64 if n in holders else 0) for n in "abcd"]
        placed = plan.plan(shared(str(i)), targets, float(i))
        assert isinstance(placed, Place)
        if placed.rule == "copy":
            copies.append(i)
            assert placed.winner.target.replica not in holders
        holders.add(placed.winner.target.replica)
        plan.first_token(str(i), 1)
        plan.finish(str(i - 8), 1, "answered", float(i))
    assert copies == [9, 19, 28]
    assert holders == set("abcd")


def test_two_copies_of_any_prefix_lie_apart_in_time() -> None:
    hot = ReplicationConfig(requests_per_copy=1, min_tokens=512, every_s=5.0)
    plan = guarded(replication=hot)
    rules = []
    for i in range(12):
        targets = [view("a", matched_blocks=64), *views("b", "c", "d")]
        placed = plan.plan(shared(str(i)), targets, float(i))
        assert isinstance(placed, Place)
        rules.append(placed.rule)
        plan.finish(str(i), 1, "answered", float(i))
        plan.plan(ask(f"busy{i}", hashes=SHARED[:10]), [view("a", matched_blocks=10)], float(i))
    assert [i for i, rule in enumerate(rules) if rule == "copy"] == [1, 6, 11]


def test_a_short_prefix_is_not_worth_a_copy() -> None:
    hot = ReplicationConfig(requests_per_copy=1, min_tokens=2048, every_s=0.0)
    plan = guarded(replication=hot)
    for i in range(5):
        targets = [view("a", matched_blocks=64), view("b")]
        placed = plan.plan(shared(str(i)), targets, 0.0)
        assert isinstance(placed, Place)
        assert placed.rule == "score"


@pytest.mark.fault("router-24")
def test_siblings_of_a_pending_prefix_stay_together_up_to_a_bound() -> None:
    plan = guarded(max_siblings=8)
    targets = views("a", "b", "c")
    chosen = [winner(plan.plan(shared(str(i)), targets, 0.0)) for i in range(24)]
    first = chosen[0]
    assert chosen[:8] == [first] * 8
    assert sorted(chosen.count(name) for name in "abc") == [8, 8, 8]


def test_a_session_stays_where_it_is_and_moves_only_when_its_target_is_overloaded() -> None:
    plan = planner("session", min_load=2)
    targets = views("a", "b", "c")
    homes = {
        f"s{i}": winner(planner("session").plan(ask("x", session=f"s{i}"), targets, 0.0))
        for i in range(1, 7)
    }
    assert len(set(homes.values())) > 1
    for name, home in homes.items():
        assert winner(plan.plan(ask(f"{name}2", session=name), targets, 0.0)) == home
        plan.finish(f"{name}2", 1, "answered", 0.0)
    left = [t for t in targets if t.target.replica != homes["s1"]]
    moved = winner(plan.plan(ask("x", session="s1"), left, 0.0))
    assert moved != homes["s1"]
    crowd = [winner(plan.plan(ask(f"c{i}", session="s1"), targets, 0.0)) for i in range(9)]
    assert crowd[:3] == [homes["s1"]] * 3
    assert len(set(crowd)) > 1


def test_a_request_without_a_session_goes_where_there_is_least_work() -> None:
    targets = [view("a", num_reserved=2), view("b", num_reserved=1)]
    assert winner(planner("session").plan(ask(), targets, 0.0)) == "b"


def test_power_of_two_takes_the_less_loaded_of_two_drawn_ones() -> None:
    plan = planner("power_of_two")
    placed = plan.plan(ask("x"), [view(n, num_reserved=i) for i, n in enumerate("abcd")], 0.0)
    assert isinstance(placed, Place)
    drawn = [c for c in placed.candidates if c.score is not None]
    assert len(drawn) == 2
    assert placed.winner.num_active == min(c.num_active for c in drawn)
    chosen = [winner(plan.plan(ask(str(i)), views("a", "b", "c", "d"), 0.0)) for i in range(400)]
    assert all(80 <= chosen.count(name) <= 120 for name in "abcd")


def test_longest_prefix_goes_where_most_is_cached_however_busy() -> None:
    targets = [view("a", matched_blocks=9, reserved_prefill_tokens=50_000), view("b")]
    assert winner(planner("longest_prefix").plan(ask(), targets, 0.0)) == "a"


@pytest.mark.fault("router-58")
@pytest.mark.parametrize(
    "policy",
    ["least_load", "longest_prefix", "power_of_two", "prefix_cost", "round_robin", "session"],
)
def test_a_recorded_decision_is_decided_the_same_again(policy: str) -> None:
    hot = ReplicationConfig(requests_per_copy=4, min_tokens=512, every_s=0.0)
    plan = guarded(policy, saturation_s=3.0, replication=hot)
    rules = set()
    for i in range(80):
        targets = [
            view(name, matched_blocks=64 if j == 0 else 0, reserved_prefill_tokens=50 * i * j)
            for j, name in enumerate("abcd")
        ]
        request = shared(str(i)) if i % 2 else ask(str(i), session=f"s{i % 5}")
        placed = plan.plan(request, targets, float(i))
        assert isinstance(placed, Place)
        rules.add(placed.rule)
        rebuilt = build_policy(placed.policy, placed.params, owner="test")
        assert replayed(placed, request, rebuilt, gateway="gw") == placed.winner.target
        if i % 3 == 0:
            plan.finish(str(i), 1, "answered", float(i))
    assert rules >= ({"score", "copy"} if rebuilt.weighs_cache else {"score"})


def test_the_parts_of_a_score_add_up_to_it() -> None:
    for policy in ("least_load", "longest_prefix", "prefix_cost", "round_robin"):
        placed = planner(policy).plan(ask(), [view("a", num_reserved=3, matched_blocks=2)], 0.0)
        assert isinstance(placed, Place)
        parts = build_policy(policy, {}, owner="test").parts(placed.winner, placed.candidates)
        assert sum(part.value for part in parts) == pytest.approx(placed.winner.score)


def test_retries_are_bounded_by_a_share_of_the_traffic() -> None:
    budget = RetryBudget(share=0.2, burst=2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(6):
        budget.note_request()
    assert [budget.take() for _ in range(2)] == [True, False]


def test_quarantine_ends_by_itself_and_is_bounded() -> None:
    quarantine = Quarantine(duration_s=600.0, max_digests=2)
    quarantine.add(b"a", 0.0)
    assert (quarantine.left_s(b"a", 100.0), quarantine.left_s(b"b", 100.0)) == (500.0, None)
    assert quarantine.left_s(b"a", 600.0) is None
    assert quarantine.is_empty
    for digest in (b"a", b"b", b"c"):
        quarantine.add(digest, 0.0)
    assert [quarantine.left_s(d, 0.0) for d in (b"a", b"b", b"c")] == [None, 600.0, 600.0]
