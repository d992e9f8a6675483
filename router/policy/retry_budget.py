"""How many requests may be tried again: a share of the traffic, so that retries cannot storm.

Pure counting; it knows neither why an attempt failed nor when. What the gateways of a fleet may
spend together is divided between them by whoever calls `grant`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RetryBudget:
    """A bucket: each request puts `share` of a retry in, each retry takes one out.

    It holds at most `burst` and starts full, so that the death of one replica under full load can
    be made good at once. `earned` and `spent` are all that was ever put in and taken out.
    """

    share: float
    burst: float
    earned: float = 0.0
    spent: int = 0
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.burst

    def note_request(self) -> None:
        """Count a request that has come in."""
        self.earned += self.share
        self._left = min(self.burst, self._left + self.share)

    def take(self) -> bool:
        """Take a retry out; False, and nothing is taken, when none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        self.spent += 1
        return True

    def grant(self, left: float, *, earned: float, spent: int) -> None:
        """Go on with this gateway's part of what the fleet had left at these totals."""
        since = self.earned - earned - (self.spent - spent)
        self._left = min(self.burst, left + since)
