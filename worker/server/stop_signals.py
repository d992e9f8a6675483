"""SIGTERM and SIGINT as events of an event loop. What comes of them is the replica's business."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.at_once = asyncio.Event()

    def arrive(self) -> None:
        """Take one signal."""
        (self.at_once if self.drain.is_set() else self.drain).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Receive the process's signals inside the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.arrive)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
