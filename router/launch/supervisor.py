"""Keeps child processes running: start, ready, restart with back-off, stop in order.

Every child leads a process group of its own (a Ctrl-C at the terminal reaches the supervisor
alone) and is tied to the supervisor's life by the kernel. It knows commands, log files and probes,
not what the children are.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvindex.foundation.errors import PrefixFleetError
from router.launch.process_group import (
    adopt_orphans,
    end_group,
    in_words,
    last_line,
    send_signal,
    signal_group,
    spawn,
)
from router.launch.restart import RestartHistory, RestartPolicy

_POLL_S = 0.1
FINAL_EXIT_CODES = (2, 3)
"""What our programs return when trying again cannot help: usage/config, missing dependency."""


class ChildFailedError(PrefixFleetError):
    """Raised when a child does not become ready or does not stay up.

    `exit_code` is what the command line returns: that of the child, or the caller's own.
    """

    kind = "child_failed"

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One program to keep running.

    `probe` blocks briefly (it runs in a thread) and tells whether the child serves.
    `stop_timeout_s` is what it gets between SIGTERM and SIGKILL.
    """

    name: str
    argv: Sequence[str]
    log_file: Path
    probe: Callable[[], bool]
    stop_timeout_s: float
    death_signal: signal.Signals = signal.SIGKILL
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    history: RestartHistory
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    has_been_ready: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Owns the children; `on_pid` hears every start (pid) and end (None) of one."""

    def __init__(
        self,
        policy: RestartPolicy,
        *,
        on_pid: Callable[[str, int | None], None],
        say: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._on_pid = on_pid
        self._say = say
        self._children: dict[str, _Child] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._force = asyncio.Event()
        adopt_orphans()

    def start(self, spec: ChildSpec) -> None:
        """Start a child and keep it running until `stop`. Call from the main thread."""
        child = _Child(spec, RestartHistory(self._policy))
        self._children[spec.name] = child
        child.task = asyncio.create_task(self._keep_running(child), name=f"keep {spec.name}")

    async def wait_ready(self, names: Iterable[str], *, timeout_s: float) -> None:
        """Wait until all are ready; raise ChildFailedError when one fails or takes too long."""
        children = [self._children[name] for name in names]
        waiting = asyncio.create_task(_all_set([child.ready for child in children]))
        try:
            watched: set[asyncio.Future[None]] = {waiting, self._failure}
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            late = [c.spec for c in children if not c.ready.is_set()]
            if late:
                raise ChildFailedError(
                    f"{late[0].name} is not ready after {timeout_s:g} s; see {late[0].log_file}",
                    exit_code=4,
                )
        finally:
            waiting.cancel()

    async def wait_failure(self) -> None:
        """Wait for ever, or until a child cannot be kept up: then raise ChildFailedError."""
        await asyncio.shield(self._failure)

    def force(self) -> None:
        """Let `stop` kill instead of waiting for a drain, now and from now on."""
        self._force.set()

    async def stop(self, names: Iterable[str]) -> None:
        """End these children together and return when nothing is left of them."""
        children = [self._children.pop(name) for name in names if name in self._children]
        await asyncio.gather(*(self._stop(child) for child in children))

    async def stop_all(self, order: Iterable[Iterable[str]]) -> None:
        """End the children group by group, then whatever no group names."""
        for group in order:
            await self.stop(group)
        await self.stop(list(self._children))
        if self._failure.done():
            self._failure.exception()  # retrieved, so that the loop does not report it
        else:
            self._failure.cancel()

    async def _keep_running(self, child: _Child) -> None:
        try:
            await self._run_until_stopped(child)
        except ChildFailedError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ChildFailedError(f"cannot start {child.spec.name}: {error}", exit_code=1))

    def _fail(self, error: ChildFailedError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _run_until_stopped(self, child: _Child) -> None:
        spec = child.spec
        while not child.stopping.is_set():
            process = await spawn(
                spec.argv, spec.log_file, death_signal=spec.death_signal, environ=spec.environ
            )
            child.process = process
            if child.stopping.is_set():  # asked for while the process was being made
                send_signal(process.pid, signal.SIGTERM)
            self._on_pid(spec.name, process.pid)
            probing = asyncio.create_task(self._probe(child), name=f"probe {spec.name}")
            code = await process.wait()
            probing.cancel()
            child.process = None
            child.ready.clear()
            self._on_pid(spec.name, None)
            await end_group(process.pid)
            if not child.stopping.is_set():
                await self._back_off(child, code)

    async def _back_off(self, child: _Child, code: int) -> None:
        """Wait before the next start; raise ChildFailedError when there must be none."""
        spec, how = child.spec, in_words(code)
        if code in FINAL_EXIT_CODES and not child.has_been_ready:
            reason = last_line(spec.log_file).removeprefix("prefixfleet: ").removeprefix("error: ")
            raise ChildFailedError(reason or f"{spec.name} {how}", exit_code=code)
        delay_s = child.history.next_delay_s(time.monotonic())
        if delay_s is None:
            raise ChildFailedError(
                f"{spec.name} {how} and has used up its {self._policy.budget} restarts within "
                f"{self._policy.window_s:g} s; see {spec.log_file}",
                exit_code=4,
            )
        ends = len(child.history.ends)
        self._say(
            f"{spec.name} {how}; restart {ends} of {self._policy.budget} in {delay_s:g} s "
            f"(log: {spec.log_file})"
        )
        await wait_event(child.stopping, delay_s)

    async def _probe(self, child: _Child) -> None:
        started_at = time.monotonic()
        while True:
            if await asyncio.to_thread(child.spec.probe):
                break
            await asyncio.sleep(_POLL_S)
        child.has_been_ready = True
        child.ready.set()
        self._say(f"{child.spec.name} is ready after {time.monotonic() - started_at:.1f} s")

    async def _stop(self, child: _Child) -> None:
        child.stopping.set()
        if child.process is not None:
            send_signal(child.process.pid, signal.SIGTERM)
        assert child.task is not None
        await self._wait_or_force(child.task, child.spec.stop_timeout_s)
        if child.process is not None:
            self._say(f"{child.spec.name} does not stop; killing it")
            signal_group(child.process.pid, signal.SIGKILL)
        await child.task

    async def _wait_or_force(self, task: asyncio.Task[None], timeout_s: float) -> None:
        forced = asyncio.create_task(self._force.wait())
        try:
            watched: set[asyncio.Future[Any]] = {task, forced}
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forced.cancel()


async def _all_set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but no longer than `timeout_s`."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
