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
    return _in_second(math.floor(now))


@lru_cache(maxsize=1024)
def _in_second(second: int) -> Periods:
    """Return the periods of a second; every request of it asks several times."""
    at = datetime.fromtimestamp(second // _DAY_S * _DAY_S, UTC)
    next_month = (at.replace(day=1) + timedelta(days=32)).replace(day=1)
    return Periods(
        at.strftime("%Y-%m-%d"),
        at.strftime("%Y-%m"),
        at.timestamp() + _DAY_S - second,
        next_month.timestamp() - second,
    )
