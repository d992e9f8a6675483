"""The order of admission under each policy, without a scheduler."""

from __future__ import annotations

from engine.request import Request
from engine.waiting_queue import ArrivalQueue, FairQueue, WaitingQueue
from kvindex.hashing import HashScheme
from tests.engine.build import make_request


def waiting(
    queue: WaitingQueue, arrival: int, *, priority: int = 0, tenant: str = "a", weight: float = 1.0
) -> Request:
    source = make_request(f"r{arrival}", [1], priority=priority, tenant=tenant, weight=weight)
    request = Request.admit(source, HashScheme(), arrival=arrival)
    queue.add(request)
    return request


def order(queue: WaitingQueue) -> list[int]:
    return [request.arrival for request in queue.candidates()]


def test_arrival_order_keeps_the_place_of_a_request_that_comes_back() -> None:
    queue = ArrivalQueue()
    first, _, _ = (waiting(queue, i) for i in range(3))
    queue.remove(first)
    queue.add(first)
    assert order(queue) == [0, 1, 2]


def test_priority_goes_before_arrival() -> None:
    queue = ArrivalQueue(by_priority=True)
    for arrival, priority in enumerate([1, 0, 2, 0]):
        waiting(queue, arrival, priority=priority)
    assert order(queue) == [1, 3, 0, 2]


def test_aging_lets_a_low_request_pass_those_that_come_much_later() -> None:
    queue = ArrivalQueue(by_priority=True, aging_arrivals=10)
    waiting(queue, 0, priority=1)
    for arrival in (5, 9, 11, 30):
        waiting(queue, arrival, priority=0)
    assert order(queue) == [5, 9, 0, 11, 30]


def test_fair_order_takes_the_tenant_that_was_served_least() -> None:
    queue = FairQueue()
    for arrival, tenant in enumerate("aaab"):
        waiting(queue, arrival, tenant=tenant)
    first = next(queue.candidates())
    queue.charge(first, 100.0)
    assert order(queue) == [3, 0, 1, 2]


def test_fair_order_follows_charges_while_it_is_walked() -> None:
    queue = FairQueue()
    for arrival, tenant in enumerate("aabb"):
        waiting(queue, arrival, tenant=tenant)
    walked = []
    for request in queue.candidates():
        walked.append(request.arrival)
        queue.charge(request, 10.0)
    assert walked == [0, 2, 1, 3]


def test_a_weight_divides_what_a_tenant_is_charged() -> None:
    queue = FairQueue()
    heavy = waiting(queue, 0, tenant="heavy", weight=4.0)
    queue.charge(heavy, 100.0)
    assert queue.counter("heavy") == 25.0


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue = FairQueue()
    busy = waiting(queue, 0, tenant="busy")
    queue.charge(busy, 500.0)
    waiting(queue, 1, tenant="idle")
    assert queue.counter("idle") == 500.0


def test_whoever_comes_to_an_empty_queue_starts_where_the_last_one_left_it() -> None:
    queue = FairQueue()
    busy = waiting(queue, 0, tenant="busy")
    queue.charge(busy, 500.0)
    queue.remove(busy)
    waiting(queue, 1, tenant="new")
    assert queue.counter("new") == 500.0
