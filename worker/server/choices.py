"""Runs the choices of one generation side by side and hands out their deltas as they come.

Leaving the `async with` for whatever reason aborts in the engine what has not ended. It knows no
HTTP and no OpenAI shape.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import cast

import msgspec

from engine.frontend.errors import RequestError
from engine.frontend.output_fold import Delta
from engine.messages import EngineOutput
from worker.core.client import EngineClient
from worker.server.generation import Choice

_log = logging.getLogger("prefixfleet.replica.choices")
_DELTAS_PER_CHOICE = 4


class ChoiceDelta(msgspec.Struct, frozen=True):
    """News of one choice."""

    choice: Choice
    delta: Delta


class ChoiceRunner:
    """The live requests behind one generation; choices that ended elsewhere are not run.

    At most a few deltas per choice wait to be taken; beyond that a slow reader leaves tokens in
    the engine client, where they are merged. All choices run on core `dp_rank`; without one, those
    of a prompt run on the same, so that it is computed once. Tokens come `interval` at a time.
    """

    def __init__(
        self,
        client: EngineClient,
        choices: Sequence[Choice],
        *,
        dp_rank: int | None = None,
        interval: int = 1,
    ) -> None:
        self._client = client
        self._choices = [choice for choice in choices if not choice.fold.finished]
        self._dp_rank = dp_rank
        self._interval = interval
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(
            _DELTAS_PER_CHOICE * len(self._choices)
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._num_unfinished = len(self._choices)

    async def __aenter__(self) -> ChoiceRunner:
        rank = self._dp_rank
        for choice in self._choices:
            if self._dp_rank is None and choice.request.choice == 0:
                rank = self._client.choose_rank()
            running = self._run(choice, rank)
            self._tasks.append(asyncio.create_task(running, name=choice.request.request_id))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def finished(self) -> bool:
        """Tell whether the last delta of every choice has been taken."""
        return self._num_unfinished == 0

    async def next(self, timeout_s: float | None = None) -> ChoiceDelta | None:
        """Return the next delta, None after `timeout_s` of silence.

        Raises RequestError when the engine refused or lost one of the choices.
        """
        assert not self.finished, "next after the end of every choice"
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(item, RequestError):
            raise item
        if isinstance(item, Exception):
            _log.error("a choice failed", exc_info=item)
            raise RequestError("internal", "internal error") from item
        if item.delta.finish_reason is not None:
            self._num_unfinished -= 1
        return item

    async def _run(self, choice: Choice, dp_rank: int | None) -> None:
        """Feed one choice; the error that ends it, if any, is raised where deltas are taken."""
        try:
            # The protocol promises an iterator whose closing aborts; all of ours are generators.
            source = cast(
                "AsyncGenerator[EngineOutput, None]",
                self._client.generate(choice.request, dp_rank=dp_rank, interval=self._interval),
            )
            async with aclosing(source) as outputs:
                async for output in outputs:
                    await self._queue.put(ChoiceDelta(choice, choice.push(output)))
                    if choice.fold.finished:
                        return
            raise AssertionError(f"{choice.request.request_id} ended without a finish reason")
        except Exception as error:  # noqa: BLE001  (the end of a task: its reader raises it)
            await self._queue.put(error)
