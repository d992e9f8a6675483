"""Who is admitted next: the order of requests that wait, under one of three policies.

`fcfs`: by arrival. `priority`: by priority, then arrival, with aging. `fair`: the tenant with the
smallest virtual counter first, then arrival (Virtual Token Counter, arXiv:2401.00588, charged for
computed tokens only, so that cache hits are cheap). It knows no blocks and no budgets.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Protocol

from engine.config import QueuePolicy
from engine.request import Request


class WaitingQueue(Protocol):
    """Requests that wait for admission, first-time and preempted ones alike.

    Must hold: while `candidates` is being walked, nothing is added or removed, only charged.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Walk every waiting request, in no promised order."""
        ...

    def add(self, request: Request) -> None:
        """Take in a request; a preempted one keeps the place that its arrival gives it."""
        ...

    def remove(self, request: Request) -> None:
        """Take out a request: it was admitted, or has ended."""
        ...

    def candidates(self) -> Iterator[Request]:
        """Yield every waiting request once, in the order in which they should be admitted."""
        ...

    def importance(self, request: Request) -> tuple[float, int]:
        """Return the sort key of running requests: smaller is served first, preempted last."""
        ...

    def charge(self, request: Request, cost: float) -> None:
        """Note that a request was served `cost` computed tokens."""
        ...


class ArrivalQueue:
    """`fcfs` and `priority`: one list, sorted by a key that never changes.

    Aging: with `aging_arrivals` A > 0, a request gains one level of priority over those that
    arrive A requests later. As everyone ages at the same rate, the order is that of
    priority + arrival / A, and nothing has to be sorted again.
    """

    def __init__(self, *, by_priority: bool = False, aging_arrivals: int = 0) -> None:
        self._by_priority = by_priority
        self._aging_arrivals = aging_arrivals
        self._keys: list[tuple[float, int]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        key = self.importance(request)
        position = bisect.bisect(self._keys, key)
        self._keys.insert(position, key)
        self._requests.insert(position, request)

    def remove(self, request: Request) -> None:
        position = bisect.bisect_left(self._keys, self.importance(request))
        assert self._requests[position] is request, f"{request.request_id} does not wait"
        del self._keys[position]
        del self._requests[position]

    def candidates(self) -> Iterator[Request]:
        return iter(self._requests)

    def importance(self, request: Request) -> tuple[float, int]:
        if not self._by_priority:
            return (0.0, request.arrival)
        aged = request.arrival / self._aging_arrivals if self._aging_arrivals else 0.0
        return (request.source.priority + aged, request.arrival)

    def charge(self, request: Request, cost: float) -> None:
        """Nothing is owed to anybody."""


class FairQueue:
    """`fair`: every tenant has a virtual counter of the tokens it was served, by its weight.

    A tenant whose queue was empty starts at the smallest counter of the waiting tenants: an idle
    tenant cannot save up. Two tenants that always wait differ by at most what one step serves.
    With a single tenant the order is `fcfs`.
    """

    def __init__(self) -> None:
        self._counters: dict[str | None, float] = {}
        self._waiting: dict[str | None, ArrivalQueue] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        for queue in self._waiting.values():
            yield from queue

    def add(self, request: Request) -> None:
        tenant = request.source.tenant
        queue = self._waiting.get(tenant)
        if queue is None:
            floor = min((self.counter(other) for other in self._waiting), default=self._floor)
            self._counters[tenant] = max(self.counter(tenant), floor)
            queue = self._waiting[tenant] = ArrivalQueue()
        queue.add(request)

    def remove(self, request: Request) -> None:
        tenant = request.source.tenant
        queue = self._waiting[tenant]
        queue.remove(request)
        if not queue:
            del self._waiting[tenant]
            # Whoever comes to an empty queue starts where the last one left it.
            self._floor = max(self._floor, self.counter(tenant)) if not self._waiting else 0.0

    def candidates(self) -> Iterator[Request]:
        """Yield from the tenant that has the smallest counter at that moment; ties by arrival."""
        walks = {tenant: queue.candidates() for tenant, queue in self._waiting.items()}
        heads = {tenant: next(walk) for tenant, walk in walks.items()}
        while heads:
            tenant = min(heads, key=lambda t: (self.counter(t), heads[t].arrival))
            request = heads[tenant]
            following = next(walks[tenant], None)
            if following is None:
                del heads[tenant]
            else:
                heads[tenant] = following
            yield request

    def importance(self, request: Request) -> tuple[float, int]:
        return (0.0, request.arrival)

    def charge(self, request: Request, cost: float) -> None:
        tenant = request.source.tenant
        before = self._counters.get(tenant, 0.0)
        self._counters[tenant] = before + cost / request.source.weight

    def counter(self, tenant: str | None) -> float:
        """Return a tenant's virtual counter, in tokens per weight."""
        return self._counters.get(tenant, 0.0)


def make_queue(policy: QueuePolicy, *, aging_arrivals: int) -> WaitingQueue:
    """Build the queue of a policy."""
    if policy == "fair":
        return FairQueue()
    return ArrivalQueue(by_priority=policy == "priority", aging_arrivals=aging_arrivals)
