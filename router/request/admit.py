"""Admission: how many requests are inside the gateway, and whether new ones may come.

A permit is held from before the body is read to the last byte of the answer.
"""

from __future__ import annotations

import asyncio

from engine.frontend.errors import RequestError


class Admission:
    """Counts permits up to a limit; the next one is refused with 429, never queued."""

    def __init__(self, *, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_admitted = 0
        self.draining = False
        self.retiring = False

    def admit(self) -> Admission:
        """Return what holds a permit as a context; raise `draining` or `overloaded` instead."""
        if self.draining:
            raise RequestError(
                "draining", "this gateway is shutting down; another one answers", retry_after_s=1.0
            )
        if self.num_admitted >= self._max_in_flight:
            raise RequestError(
                "overloaded",
                f"{self._max_in_flight} requests are being served; try again shortly",
                retry_after_s=1.0,
            )
        return self

    def __enter__(self) -> None:
        if not self.num_admitted:
            self._idle.clear()
        self.num_admitted += 1

    def __exit__(self, *_: object) -> None:
        self.num_admitted -= 1
        if not self.num_admitted:
            self._idle.set()

    def retire(self) -> None:
        """Note that another process has taken this one's place; who still comes is let in."""
        self.retiring = True

    async def wait_idle(self) -> None:
        """Return once nobody is inside."""
        await self._idle.wait()

    async def drain(self, *, timeout_s: float) -> int:
        """Let nobody in and wait for those inside; return how many were left after the time."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
        except TimeoutError:
            pass
        return self.num_admitted
