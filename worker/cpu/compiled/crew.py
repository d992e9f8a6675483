"""The threads that run a compiled step together: the caller, and helpers that wait for the next.

Helpers sleep between steps. It knows nothing of what a step computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[int, int], object]
Order = tuple[Work, int, object]


class Crew:
    """`size` threads, the caller's among them; helpers end with this object.

    One step at a time: `run` must not be called by two threads at once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._orders: list[SimpleQueue[Order | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._done: SimpleQueue[int] = SimpleQueue()
        self._num_busy = 0
        for index, orders in enumerate(self._orders, start=1):
            threading.Thread(
                target=_help, args=(index, orders, self._done), name=f"kernel-{index}", daemon=True
            ).start()
        weakref.finalize(self, _dismiss, self._orders)

    def settle(self) -> None:
        """Wait until no helper works on an earlier step; its record may be written again then."""
        while self._num_busy:
            self._done.get()
            self._num_busy -= 1

    def run(self, work: Work, argument: int, *, keeps: object = None) -> None:
        """Call work(argument, thread) on every thread; return when the caller's has returned.

        Helpers may still be on their way out: see `settle`. They hold on to `keeps` until then,
        so memory that only the argument leads to may belong to it.
        """
        for orders in self._orders:
            orders.put((work, argument, keeps))
        self._num_busy = len(self._orders)
        work(argument, 0)


def _help(index: int, orders: SimpleQueue[Order | None], done: SimpleQueue[int]) -> None:
    while (order := orders.get()) is not None:
        work, argument, _ = order
        work(argument, index)
        done.put(index)


def _dismiss(orders: list[SimpleQueue[Order | None]]) -> None:
    for each in orders:
        each.put(None)
