"""Percentiles as everywhere in the simulator: the value at index int(n · q) of the sorted list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

NumberT = TypeVar("NumberT", int, float)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantity is distributed over requests."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float


def percentile(ordered: Sequence[NumberT], q: float) -> NumberT:
    """Return the value at rank int(n · q), the last one for q = 1; `ordered` is not empty."""
    return ordered[min(int(len(ordered) * q), len(ordered) - 1)]


def weighted_percentile(ordered: Sequence[tuple[float, int]], q: float) -> float:
    """Return the same of values that stand for several each: (value, how many), by value."""
    rank = int(sum(weight for _, weight in ordered) * q)
    for value, weight in ordered:
        rank -= weight
        if rank < 0:
            return value
    return ordered[-1][0]


def spread(values: Iterable[int]) -> Spread | None:
    """Summarise values; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
        mean=sum(ordered) / len(ordered),
    )
