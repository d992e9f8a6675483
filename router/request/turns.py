"""Where requests wait for their turn: the planner says whose it is, this wakes them.

It orders nothing itself. Turns are offered whenever work ends at this gateway, and by a timer for
work that ends elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from kvindex.foundation.clock import Clock
from router.policy.planner import Planner

_LOOK_EVERY_S = 0.1
"""At least so often turns are offered: other gateways' work ends without a word."""
_SHORTEST_S = 0.005


class Turns:
    """Waiting requests of one gateway; each waits in its own task."""

    def __init__(self, planner: Planner, *, clock: Clock) -> None:
        self._planner = planner
        self._clock = clock
        self._events: dict[str, asyncio.Event] = {}
        self._models: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, model: str, request_id: str, *, until: float) -> None:
        """Return when it is this request's turn, or at the monotonic instant `until`."""
        event = self._events[request_id] = asyncio.Event()
        self._models[model] += 1
        self.offer()
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.monotonic())):
                await event.wait()
        except TimeoutError:
            return
        finally:
            del self._events[request_id]
            self._models[model] -= 1
            if not self._models[model]:
                del self._models[model]

    def leave(self, model: str, request_id: str) -> None:
        """Forget a request that waits no longer, and give its turn to the next."""
        self._planner.leave(model, request_id)
        self.offer()

    def offer(self) -> None:
        """Wake whoever has the turn now; to be called when something has changed."""
        if not self._models and self._timer is None:
            return
        now = self._clock.monotonic()
        for model in list(self._models):
            request_id = self._planner.next_turn(model, now)
            if request_id is not None and request_id in self._events:
                self._events[request_id].set()
        self._schedule(now)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        instants = [self._planner.next_instant(model) for model in self._models]
        waits = [instant - now for instant in instants if instant is not None]
        if waits:
            delay = min(max(min(waits), _SHORTEST_S), _LOOK_EVERY_S)
            self._timer = asyncio.get_running_loop().call_later(delay, self.offer)
