"""The circuit breaker of one replica: a pure state machine over failures and instants.

It knows neither what a failure was (the caller counts connect errors, timeouts and 5xx, never a
client's 4xx) nor what a replica is.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policy.types import BreakerState

FAILURES_TO_OPEN = 3
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Closed until `FAILURES_TO_OPEN` failures in a row, then open, then one probe at a time.

    A failed probe doubles the open time up to `MAX_OPEN_S`; any success closes the breaker.
    """

    num_failures: int = 0
    open_until: float | None = None
    open_s: float = FIRST_OPEN_S
    probing: bool = False

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`."""
        if self.open_until is None:
            return "closed"
        return "open" if now < self.open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Say whether a request may be sent: always when closed, one probe when half open."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self.probing)

    def wait_s(self, now: float) -> float:
        """Return the seconds until a probe may be sent, 0 when one may be now."""
        return 0.0 if self.open_until is None else max(0.0, self.open_until - now)

    def sent(self, now: float) -> bool:
        """Note that a request goes out; True when it is the probe."""
        if self.state(now) != "half_open":
            return False
        self.probing = True
        return True

    def succeeded(self) -> None:
        """Note that the replica answered."""
        self.num_failures = 0
        self.open_until = None
        self.open_s = FIRST_OPEN_S
        self.probing = False

    def failed(self, now: float, *, probe: bool) -> None:
        """Note that the replica did not answer, or answered with 5xx."""
        self.num_failures += 1
        if probe:
            self.probing = False
            self.open_s = min(MAX_OPEN_S, self.open_s * 2)
            self.open_until = now + self.open_s
        elif self.open_until is None and self.num_failures >= FAILURES_TO_OPEN:
            self.open_until = now + self.open_s

    def abandoned(self, *, probe: bool) -> None:
        """Note that a request ended without telling anything about the replica."""
        if probe:
            self.probing = False
