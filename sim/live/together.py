"""Several calls at once, of which the first failure is the failure of all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def together(calls: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run all calls and return their results in order.

    When one raises, the others are cancelled and that exception is raised itself.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
