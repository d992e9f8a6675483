"""The one thread that touches the device: jobs in order, background work in the pauses.

It knows neither steps nor graphs.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

_log = logging.getLogger("prefixfleet.worker.gpu")

PAUSE_S = 0.02
"""Without a job for so long the thread counts as idle: a scheduler between two steps is faster."""

Result = TypeVar("Result")


class PauseWork(Protocol):
    """What can be done in pauses, one short piece at a time."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        ...

    def between_jobs(self) -> None:
        """Do a piece that is worth holding up jobs for, if there is one."""
        ...

    def when_idle(self) -> None:
        """Do any piece."""
        ...


class ModelThread:
    """Runs jobs one after the other; `background`, once set, fills the pauses.

    Background work that fails is given up, with a log entry; jobs go on.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._background: PauseWork | None = None
        self._quiet = threading.Event()
        self._quiet.set()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job; its result or exception is the future's."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def set_background(self, background: PauseWork) -> None:
        """Fill pauses with this work from now on."""

        def begin() -> None:
            self._background = background
            self._quiet.clear()

        self.run(begin).result()

    def wait_until_quiet(self) -> None:
        """Wait until no background work is left."""
        self._quiet.wait()

    def stop(self) -> None:
        """End the thread after the jobs that are queued. Idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        was_idle = False
        while True:
            pause_s = None if self._background is None else 0.0 if was_idle else PAUSE_S
            try:
                job = self._jobs.get(timeout=pause_s)
            except queue.Empty:
                was_idle = True
                self._use_pause(idle=True)
                continue
            if job is None:
                self._background = None
                self._quiet.set()
                return
            was_idle = False
            job()
            self._use_pause(idle=False)

    def _use_pause(self, *, idle: bool) -> None:
        """Do one piece of background work, or notice that none is left."""
        background = self._background
        if background is None:
            return
        try:
            with torch.inference_mode():
                if idle:
                    background.when_idle()
                else:
                    background.between_jobs()
            is_done = background.is_done
        except Exception:  # noqa: BLE001 - a border: serving goes on without it
            _log.exception("background work failed and is given up")
            is_done = True
        if is_done:
            self._background = None
            self._quiet.set()
