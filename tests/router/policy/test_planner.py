"""The planner: every guard, the accounts it keeps, and what a decision tells of itself."""

from __future__ import annotations

import pytest

from router.policy.types import NoReplica, Place, Shed
from tests.router.policy.build import ask, planner, view, views, winner


def test_the_prediction_never_covers_the_last_token() -> None:
    plan = planner().plan(ask(num_tokens=160), [view("a", matched_blocks=10)], 0.0)
    assert isinstance(plan, Place)
    assert plan.winner.num_cached_tokens == 144
    plan = planner().plan(ask(num_tokens=161), [view("a", matched_blocks=10)], 0.0)
    assert isinstance(plan, Place)
    assert plan.winner.num_cached_tokens == 160


def test_a_prompt_without_a_chain_predicts_nothing() -> None:
    request = ask(block_size=None, hashes=())
    plan = planner().plan(request, [view("a", matched_blocks=10)], 0.0)
    assert isinstance(plan, Place)
    assert plan.winner.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "exclusion"),
    [
        ({"draining": True}, "draining"),
        ({"max_model_len": 100}, "too_short"),
        ({"isolates": False}, "not_isolating"),
        ({"reserved_prefill_tokens": 60_001}, "saturated"),
    ],
)
def test_a_guard_sends_the_request_elsewhere_and_says_why(
    fields: dict[str, object], exclusion: str
) -> None:
    targets = [view("a", matched_blocks=10, **fields), view("b")]
    plan = planner().plan(ask(isolated=True), targets, 0.0)
    assert winner(plan) == "b"
    assert {c.target.replica: c.excluded for c in plan.candidates} == {"a": exclusion, "b": None}


@pytest.mark.fault("router-44")
def test_a_retry_never_goes_back_to_a_replica_that_was_tried() -> None:
    plan = planner()
    warm = [view("a", matched_blocks=10), view("b"), view("c")]
    tried: frozenset[str] = frozenset()
    order = []
    for attempt in (1, 2, 3):
        chosen = winner(plan.plan(ask(attempt=attempt, tried=tried), warm, 0.0))
        plan.finish("q", attempt, "failed", 0.0)
        order.append(chosen)
        tried |= {chosen}
    assert order[0] == "a"
    assert sorted(order) == ["a", "b", "c"]
    assert isinstance(plan.plan(ask(attempt=4, tried=tried), warm, 0.0), NoReplica)


def test_a_lapsed_target_serves_only_when_no_live_one_is_left() -> None:
    lapsed, live = view("a", live=False, matched_blocks=10), view("b")
    assert winner(planner().plan(ask(), [lapsed, live], 0.0)) == "b"
    assert winner(planner().plan(ask(), [lapsed], 0.0)) == "a"
    assert winner(planner().plan(ask(tried=frozenset({"b"})), [lapsed, live], 0.0)) == "a"


def test_nothing_to_serve_it_says_what_every_replica_is() -> None:
    plan = planner().plan(ask(), [view("a", draining=True), view("b", max_model_len=8)], 0.0)
    assert isinstance(plan, NoReplica)
    assert plan.reason == "every replica has too short a context for it or is draining"
    assert plan.retry_after_s is None
    assert planner().plan(ask(), [], 0.0) == NoReplica(reason="there is none", retry_after_s=None)


@pytest.mark.fault("router-48")
def test_overload_is_shed_with_the_time_to_wait_and_is_not_the_same_as_no_replica() -> None:
    plan = planner().plan(ask(), [view("a", reserved_prefill_tokens=75_000)], 0.0)
    assert isinstance(plan, Shed)
    assert plan.retry_after_s == 15.0


@pytest.mark.fault("router-36")
def test_own_work_counts_before_any_report_of_it_arrives() -> None:
    plan = planner("least_load")
    targets = views("a", "b", "c", "d")
    chosen = [winner(plan.plan(ask(str(i)), targets, 0.0)) for i in range(100)]
    assert {name: chosen.count(name) for name in "abcd"} == dict.fromkeys("abcd", 25)


@pytest.mark.fault("router-37")
def test_only_uncached_tokens_count_as_queued_prefill() -> None:
    plan = planner()
    targets = [view("a", matched_blocks=1800), view("b", reserved_prefill_tokens=40_000)]
    assert winner(plan.plan(ask(num_tokens=30_000), targets, 0.0)) == "a"
    (account,) = plan.ledger.accounts.values()
    assert account.prefill_tokens == 1200
    plan.first_token("q", 1)
    assert (account.prefill_tokens, account.num_active) == (0, 1)


@pytest.mark.fault("router-39")
def test_accounts_end_at_zero_after_any_mixture_of_ends() -> None:
    plan = planner()
    targets = views("a", "b", "c")
    for i in range(90):
        plan.plan(ask(str(i)), targets, 0.0)
        if i % 2:
            plan.first_token(str(i), 1)
        for _ in range(1 + i % 3):  # Finishing again, and a first token after it, change nothing.
            plan.finish(str(i), 1, ("answered", "failed", "abandoned")[i % 3], float(i * 100))
            plan.first_token(str(i), 1)
    accounts = plan.ledger.accounts.values()
    assert [(a.num_active, a.prefill_tokens, len(a.block_refs)) for a in accounts] == [
        (0, 0, 0)
    ] * 3
    assert not plan.ledger.entries


def test_replicas_that_left_are_forgotten_but_not_what_still_runs_there() -> None:
    plan = planner()
    plan.plan(ask("1"), views("a"), 0.0)
    plan.plan(ask("2"), views("b"), 0.0)
    plan.finish("2", 1, "answered", 0.0)
    plan.forget(["a", "b"])
    assert [target.replica for target in plan.ledger.accounts] == ["a"]
    plan.finish("1", 1, "answered", 0.0)
    assert plan.ledger.accounts.popitem()[1].num_active == 0


def test_a_decision_holds_everything_needed_to_reproduce_it() -> None:
    targets = [view("a", matched_blocks=5), view("b", reserved_prefill_tokens=100), view("c")]
    plan = planner().plan(ask(), targets, 0.0)
    assert isinstance(plan, Place)
    scores = {c.target.replica: c.score for c in plan.candidates}
    # (queued + uncached * 2) / 1000, and 8 times the seconds of what only `a` holds
    assert scores == {"a": pytest.approx(0.162), "b": pytest.approx(1.062), "c": 0.962}
    assert (winner(plan), plan.policy) == ("a", "prefix_cost")
