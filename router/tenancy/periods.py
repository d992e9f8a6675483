"""Days and months of UTC, which budgets are counted by."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

_DAY_S = 86_400


class Periods(NamedTuple):
    """The day (`2026-11-29`) and month (`2026-11`) of an instant, and the seconds left of each."""

    day: str
    month: str
    day_left_s: float
    month_left_s: float


def periods_at(now: float) -> Periods:
    """Return the periods that an instant (seconds since the Unix epoch) is in."""
    day, month, day_ends_at, month_ends_at = _on_day(int(now // _DAY_S))
    return Periods(day, month, math.ceil(day_ends_at - now), math.ceil(month_ends_at - now))


@lru_cache(maxsize=1024)
def _on_day(number: int) -> tuple[str, str, float, float]:
    """Return day, month and their ends for a day counted from the Unix epoch."""
    at = datetime.fromtimestamp(number * _DAY_S, UTC)
    next_month = (at.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (
        at.strftime("%Y-%m-%d"),
        at.strftime("%Y-%m"),
        at.timestamp() + _DAY_S,
        next_month.timestamp(),
    )
