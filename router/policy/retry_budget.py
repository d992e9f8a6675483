"""How many requests may be tried again: a share of the traffic, so that retries cannot storm.

Pure counting; it knows neither why an attempt failed nor when. Every gateway keeps to the share of
its own traffic, which keeps the fleet to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RetryBudget:
    """A bucket: each request puts `share` of a retry in, each retry takes one out.

    It holds at most `burst` and starts full, so that the death of one replica under full load can
    be made good at once.
    """

    share: float
    burst: float
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.burst

    def note_request(self) -> None:
        """Count a request that has come in."""
        self._left = min(self.burst, self._left + self.share)

    def take(self) -> bool:
        """Take a retry out; False, and nothing is taken, when none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
