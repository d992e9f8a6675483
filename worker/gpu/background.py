"""Work that can wait until the model has nothing better to do: checks and graph captures.

Each piece is short enough to stand between two steps. It runs on the model's own thread, because a
capture tolerates no other work on the device.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from worker.gpu.dispatcher import GraphDispatcher, GraphKey

_log = logging.getLogger("prefixfleet.worker.gpu")

HOT_MISSES = 8
"""A graph that so many steps have missed is worth a pause even under load."""

STEPS_BETWEEN = 16
"""Steps between two such pauses, so that captures take a bounded share of a busy device."""


class BackgroundWork:
    """`checks`, then the captures of every graph, hot ones first; one piece at a time."""

    def __init__(
        self,
        dispatcher: GraphDispatcher,
        capture: Callable[[GraphKey], None],
        checks: Sequence[Callable[[], object]],
    ) -> None:
        self._dispatcher = dispatcher
        self._capture = capture
        self._checks = deque(checks)
        self._num_busy_steps = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._checks and self._dispatcher.next_to_capture(min_misses=0) is None

    def between_jobs(self) -> None:
        """Capture a graph that many steps have missed, once every few steps."""
        self._num_busy_steps += 1
        if self._num_busy_steps < STEPS_BETWEEN:
            return
        key = self._dispatcher.next_to_capture(min_misses=HOT_MISSES)
        if key is not None:
            self._num_busy_steps = 0
            self._capture(key)

    def when_idle(self) -> None:
        """Do a check, or else capture the graph that was missed most."""
        if self._checks:
            self._checks.popleft()()
            return
        key = self._dispatcher.next_to_capture(min_misses=0)
        if key is not None:
            self._capture(key)
