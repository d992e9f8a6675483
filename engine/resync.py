"""How scheduling goes on with a runner that has lost its place, or its memory.

Steps in flight are taken back and running requests preempted, so that a runner which knows no
request is up to date. The next step is the resync: it tells the runner to forget everything, and
brings each request that runs again as a new one, with all its tokens and block ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.output import SchedulerOutput
from engine.transfer import BlockTransfer

MAX_RESYNCS = 3
"""Resyncs in a row without one computed step, after which the executor is lost."""


class Resync:
    """What a runner is owed until a step has returned again.

    `num_attempts`: resyncs since a step returned; `num_total`: all. Block moves of steps that were
    never taken in are owed in their order: they come before anything that is computed since, so
    their sources still hold what they held then.
    """

    def __init__(self) -> None:
        self.num_total = 0
        self.num_attempts = 0
        self._moves: list[BlockTransfer] = []
        self._is_due = False

    def lose(self, steps: Iterable[SchedulerOutput], *, kv_lost: bool) -> None:
        """Note steps that were never taken in; what was to move is gone when the memory is."""
        self.num_total += 1
        self.num_attempts += 1
        self._is_due = True
        if kv_lost:
            self._moves.clear()
        else:
            self._moves += [move for step in steps for move in step.transfers]

    def begin_anew(self) -> None:
        """Note that steps were taken in, with their moves, but never computed."""
        self._is_due = True

    def complete(self, step: SchedulerOutput, *, num_blocks: int) -> SchedulerOutput:
        """Return what the runner is to be told in place of `step`: the same unless a resync is due.

        `num_blocks` is the pool's size, which a new runner does not know.
        """
        if not self._is_due:
            return step
        self._is_due = False
        known = {request.request_id for request in step.new_requests}
        assert known.issuperset(step.num_scheduled_tokens), "a resync continues a request"
        return msgspec.structs.replace(
            step,
            resync=True,
            dropped_request_ids=[],
            transfers=[*self._moves, *step.transfers],
            num_blocks=num_blocks,
        )

    def settle(self) -> None:
        """Note that a step has returned: the runner follows again."""
        self.num_attempts = 0
        self._moves.clear()
