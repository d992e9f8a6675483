"""Waiting in tests: for a condition, with a deadline, never for a guessed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], *, seconds: float = 10.0) -> None:
    """Return once the condition, plain or awaitable, is true; TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true after {seconds} s")
        await asyncio.sleep(0.005)
