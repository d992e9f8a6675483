"""The breaker: what opens it, how it probes, and that planner and breaker agree."""

from __future__ import annotations

from router.policy.breaker import Breaker
from router.policy.types import NoReplica
from tests.router.policy.build import ask, planner, views, winner


def test_it_opens_at_the_third_failure_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.failed(0.0, probe=False)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0.0, probe=False)
    assert breaker.state(0.0) == "closed"
    breaker.failed(0.0, probe=False)
    assert (breaker.state(0.0), breaker.wait_s(0.25)) == ("open", 0.75)


def test_half_open_lets_one_probe_through_and_its_failure_doubles_the_pause() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(0.0, probe=False)
    assert breaker.allows(1.0)
    assert breaker.sent(1.0)
    assert not breaker.allows(1.0)
    breaker.failed(1.0, probe=True)
    assert (breaker.state(2.9), breaker.state(3.0)) == ("open", "half_open")
    breaker.sent(3.0)
    breaker.succeeded()
    assert breaker.state(3.0) == "closed"


def test_a_probe_that_its_client_gave_up_makes_room_for_another() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(0.0, probe=False)
    breaker.sent(1.0)
    breaker.abandoned(probe=True)
    assert breaker.allows(1.0)


def test_the_planner_avoids_an_open_replica_and_tells_when_to_come_back() -> None:
    plan = planner("round_robin")
    for i in range(3):
        plan.plan(ask(str(i)), views("a"), 0.0)
        plan.finish(str(i), 1, "failed", 10.0)
    assert [winner(plan.plan(ask(f"b{i}"), views("a", "b"), 10.5)) for i in range(2)] == ["b", "b"]
    refused = plan.plan(ask("c"), views("a"), 10.5)
    assert isinstance(refused, NoReplica)
    assert refused.retry_after_s == 1.0
    assert winner(plan.plan(ask("d"), views("a"), 11.0)) == "a"
    assert isinstance(plan.plan(ask("e"), views("a"), 11.0), NoReplica)
    plan.first_token("d", 1)
    assert winner(plan.plan(ask("f"), views("a"), 11.0)) == "a"
