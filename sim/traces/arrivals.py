"""When requests arrive: rate, burstiness, and whether the clock was cut into coarse ticks.

Ticks matter: requests of one tick arrive together, so the tail of any latency that comes out of a
plain replay is the clock's, not the policy's.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from sim.traces.percentiles import percentile

# A clock is called coarse when rows share times this often and distinct times keep their distance.
MIN_ROWS = 100
MAX_DISTINCT_SHARE = 0.5
MIN_REGULARITY = 0.5


class Ticks(msgspec.Struct, frozen=True, kw_only=True):
    """A coarse clock: its step, how many different times there are, most rows at one time."""

    tick_s: float
    num_times: int
    largest_burst: int

    def sentence(self) -> str:
        """Say what it means."""
        return (
            f"times sit on ticks of about {self.tick_s:.3g} s ({self.num_times} different ones, "
            f"up to {self.largest_burst} requests on one): replay with jitter inside a tick"
        )


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """`gap_cv` is the coefficient of variation of the times between arrivals (1 for Poisson)."""

    span_s: float
    rate_per_s: float | None
    gap_cv: float | None
    ticks: Ticks | None


def describe_arrivals(arrivals_s: Sequence[float]) -> Arrivals:
    """Describe times of arrival in ascending order."""
    gaps = [later - earlier for earlier, later in pairwise(arrivals_s)]
    span_s = arrivals_s[-1] - arrivals_s[0] if gaps else 0.0
    mean = span_s / len(gaps) if gaps else 0.0
    return Arrivals(
        span_s=span_s,
        rate_per_s=len(arrivals_s) / span_s if span_s else None,
        gap_cv=statistics.pstdev(gaps, mean) / mean if mean else None,
        ticks=find_ticks(arrivals_s),
    )


def find_ticks(arrivals_s: Sequence[float]) -> Ticks | None:
    """Return the ticks of a coarse clock, None where arrivals do not look cut into any.

    The step is the median distance of neighbouring times. A clock that is merely shared by
    bursts has neighbours much closer than that.
    """
    times = sorted(set(arrivals_s))
    if len(arrivals_s) < MIN_ROWS or not 1 < len(times) <= MAX_DISTINCT_SHARE * len(arrivals_s):
        return None
    steps = sorted(later - earlier for earlier, later in pairwise(times))
    tick_s = percentile(steps, 0.5)
    if percentile(steps, 0.1) < MIN_REGULARITY * tick_s:
        return None
    return Ticks(
        tick_s=tick_s, num_times=len(times), largest_burst=max(Counter(arrivals_s).values())
    )
