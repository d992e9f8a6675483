"""When to start a process again, and when to give up: back-off and budget, as a pure fold.

It knows no process and no clock: instants are arguments, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double from `initial_s` to `max_s`; at most `budget` ends count in `window_s`."""

    initial_s: float
    max_s: float
    budget: int
    window_s: float


@dataclass(slots=True)
class RestartHistory:
    """The recent ends of one process."""

    policy: RestartPolicy
    ends: deque[float] = field(default_factory=deque)

    def next_delay_s(self, now: float) -> float | None:
        """Note an end at `now` and return how long to wait, None when the budget is spent."""
        while self.ends and now - self.ends[0] > self.policy.window_s:
            self.ends.popleft()
        if len(self.ends) >= self.policy.budget:
            return None
        self.ends.append(now)
        return min(self.policy.initial_s * 2.0 ** (len(self.ends) - 1), self.policy.max_s)
