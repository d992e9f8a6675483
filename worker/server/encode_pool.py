"""A small bounded thread pool for parsing, templating and tokenizing.

Long texts take many milliseconds; on the event loop they would hold up every stream. It knows
nothing of what runs in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.frontend.errors import RequestError

ResultT = TypeVar("ResultT")


class EncodePool:
    """Runs functions off the event loop; refuses with `overloaded` when too many wait.

    A caller that is cancelled leaves at once; its function, if it has begun, still runs to its
    end and counts until then.
    """

    def __init__(self, *, num_threads: int, max_pending: int = 256) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._max_pending = max_pending
        self._num_pending = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread and return what it returns, or raise what it raises."""
        if self._num_pending >= self._max_pending:
            raise RequestError(
                "overloaded",
                f"{self._num_pending} prompts are waiting to be tokenized; try again",
                retry_after_s=1.0,
            )
        self._count(1)
        future = self._executor.submit(work)
        future.add_done_callback(lambda _: self._count(-1))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what has not begun; running functions end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _count(self, change: int) -> None:
        with self._lock:  # futures end in the pool's threads
            self._num_pending += change
