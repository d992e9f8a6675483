"""The face of an engine that the front process talks to.

Implementations: ProcessClient (worker/core/process_client.py, over ZMQ) and AsyncInprocClient
(below it, same process; tests and small tools).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats, PoolSnapshot


class EngineClient(Protocol):
    """Asynchronous access to one engine core."""

    @property
    def info(self) -> EngineInfo:
        """What the core said when it became ready."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest statistics."""
        ...

    @property
    def last_heard_at(self) -> float:
        """Monotonic instant of the core's last message; it beats at least every second."""
        ...

    @property
    def dead_reason(self) -> str | None:
        """Why the core is gone, None while it lives."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run a request; closing the iterator early aborts it in the core.

        The last output has a `finish_reason`. Raises RequestError: `context_length_exceeded` or
        `invalid_request` when the core refuses the request, `engine_dead` when the core dies.
        """
        ...

    async def snapshot(self) -> PoolSnapshot:
        """Return every cached block as of a step border."""
        ...

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False (and nothing changed) while requests hold blocks."""
        ...

    async def close(self) -> None:
        """End the core: nothing of it is left when this returns."""
        ...
