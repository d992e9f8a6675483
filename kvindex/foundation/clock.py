"""Time as an argument: the seam between code that decides and the clock on the wall.

It deliberately knows no scheduling: whoever waits, waits in its own loop.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tell the time in seconds."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes backwards; the origin means nothing."""
        ...


class SystemClock:
    """The clock of this machine."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


class VirtualClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time on; negative steps raise ValueError."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
