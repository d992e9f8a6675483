"""When a target's lease is renewed: in its turn, and at once when there is news to tell.

It looks at what would be reported and knows no index; kvindex/ingest.py does the renewing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvindex.index import LoadReport

LOOK_S = 0.1
"""News waits at most this long, and causes at most one renewal in that time."""

SPEED_FACTOR = 2.0


class RenewalTurns:
    """Turns every `renew_s` seconds, earlier for what should not wait.

    `report` is what a renewal would tell now; news is what differs from how it was at the last
    turn, whether that renewal went well or not.
    """

    def __init__(self, renew_s: float, report: Callable[[], LoadReport]) -> None:
        self._renew_s = renew_s
        self._report = report
        self._last: LoadReport | None = None
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """End the present wait, or the next one."""
        self._asked.set()

    async def next(self) -> None:
        """Wait until the lease is to be renewed."""
        loop = asyncio.get_running_loop()
        turn_at = loop.time() + self._renew_s
        while (left_s := turn_at - loop.time()) > 0 and not self._asked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._asked.wait()
            if self._last is not None and is_news(self._last, self._report()):
                break
        self._asked.clear()
        self._last = self._report()


def is_news(last: LoadReport, now: LoadReport) -> bool:
    """Tell whether trust is another, or a speed was measured first or differs by a factor of two.

    Gateways place by both; the rest of a report may be as old as a turn.
    """
    return (
        (last.mode, last.reason) != (now.mode, now.reason)
        or _is_other_speed(last.prefill_tokens_per_s, now.prefill_tokens_per_s)
        or _is_other_speed(last.decode_tokens_per_s, now.decode_tokens_per_s)
    )


def _is_other_speed(last: float, now: float) -> bool:
    return now > 0 and not last / SPEED_FACTOR <= now <= last * SPEED_FACTOR
