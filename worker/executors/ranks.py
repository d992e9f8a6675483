"""What an executor needs of the processes that run its ranks, wherever they are."""

from __future__ import annotations

from typing import Protocol

from kvindex.foundation.errors import PrefixFleetError
from worker.executors.runner_messages import FromRunner


class RanksLostError(PrefixFleetError):
    """Raised when the ranks cannot go on together: one is gone, or no longer does what others do.

    `shortage`: one of them ran out of memory, and this is what it said.
    """

    def __init__(self, reason: str, *, shortage: str | None = None) -> None:
        super().__init__(reason)
        self.shortage = shortage


class Ranks(Protocol):
    """The running ranks of one executor. Each first says that it is ready."""

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own machine."""
        ...

    def send(self, frame: bytes) -> None:
        """Send a step to every rank; never blocks."""
        ...

    def receive(self, deadline: float | None) -> tuple[int, FromRunner] | None:
        """Return the next answer and its rank, None at the deadline (`time.monotonic`).

        RanksLostError as soon as any rank is dead and no answer is left.
        """
        ...

    def stop(self) -> None:
        """End every rank, whatever it does. Idempotent."""
        ...
