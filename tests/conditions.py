"""Waiting in tests: for a condition, with a deadline, never for a guessed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], *, seconds: float = 5.0) -> None:
    """Return once the condition is true; TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true after {seconds} s")
        await asyncio.sleep(0.01)
