"""When each request of a workload is sent: by the trace's clock, or by what has ended.

Pure bookkeeping over a stream of arrivals; it is told what was sent and what ended, and says what
comes next and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from sim.config import ReplayConfig
from sim.workload import Arrival


class Due(NamedTuple):
    """A request and the time at which it is sent."""

    at_s: float
    arrival: Arrival


class Pacing(Protocol):
    """Each arrival is handed out exactly once."""

    def first(self) -> Iterable[Due]:
        """Return what is sent without waiting for anything."""
        ...

    def sent(self) -> Due | None:
        """Return what follows a request that was just sent, if that is known by now."""
        ...

    def ended(self, arrival: Arrival, at_s: float) -> Due | None:
        """Return what follows a request that was answered or refused at `at_s`."""
        ...


class OpenLoop:
    """Requests come when the trace says, whatever the fleet does; the trace is streamed."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = iter(arrivals)

    def first(self) -> Iterable[Due]:
        due = self.sent()
        return [] if due is None else [due]

    def sent(self) -> Due | None:
        arrival = next(self._arrivals, None)
        return None if arrival is None else Due(arrival.at_s, arrival)

    def ended(self, arrival: Arrival, at_s: float) -> Due | None:
        """Nothing follows from an answer."""
        return None


class FixedConcurrency:
    """So many requests are in flight, in the order of the trace; its clock is ignored."""

    def __init__(self, arrivals: Iterable[Arrival], *, in_flight: int) -> None:
        self._arrivals = iter(arrivals)
        self._in_flight = in_flight

    def first(self) -> Iterable[Due]:
        for arrival in islice(self._arrivals, self._in_flight):
            yield Due(0.0, arrival)

    def sent(self) -> Due | None:
        """Nothing follows before an answer."""
        return None

    def ended(self, arrival: Arrival, at_s: float) -> Due | None:
        following = next(self._arrivals, None)
        return None if following is None else Due(at_s, following)


class ClosedLoop:
    """A turn of a session comes its think time after the answer to the turn before.

    The think time is the trace's delay, else the time between the two recorded arrivals.
    Requests without a session come when the trace says. Holds all turns that are yet to come.
    """

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._turns: dict[str, deque[Due]] = {}
        self._first: list[Due] = []
        last_at_s: dict[str, float] = {}
        for arrival in arrivals:
            session = arrival.session
            if session is None or session not in last_at_s:
                self._first.append(Due(arrival.at_s, arrival))
            else:
                gap_s = arrival.at_s - last_at_s[session]
                think_s = gap_s if arrival.delay_s is None else arrival.delay_s
                self._turns.setdefault(session, deque()).append(Due(think_s, arrival))
            if session is not None:
                last_at_s[session] = arrival.at_s

    def first(self) -> Iterable[Due]:
        return self._first

    def sent(self) -> Due | None:
        """Nothing follows before an answer."""
        return None

    def ended(self, arrival: Arrival, at_s: float) -> Due | None:
        turns = self._turns.get(arrival.session) if arrival.session is not None else None
        if not turns:
            return None
        think_s, following = turns.popleft()
        return Due(at_s + think_s, following)


def make_pacing(config: ReplayConfig, arrivals: Iterable[Arrival]) -> Pacing:
    """Build the pacing of a mode that has a clock; `fixed` defaults to 4 per replica."""
    if config.mode == "fixed":
        return FixedConcurrency(arrivals, in_flight=config.in_flight or 4 * config.replicas)
    if config.mode == "closed":
        return ClosedLoop(arrivals)
    return OpenLoop(arrivals)
