"""Keeps child processes running: start, ready, restart with back-off, replace, stop in order.

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

from kvindex.foundation.errors import DependencyError, PrefixFleetError
from router.launch.process_group import (
    Inherited,
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
    `stop_timeout_s` is what it gets between SIGTERM and SIGKILL; one that is replaced gets
    `retire_signal` and the time it needs. `hand_over` is asked before each start for what the
    process inherits, `on_end` hears before each pause how many ends are recent.
    """

    name: str
    argv: Sequence[str]
    log_file: Path
    probe: Callable[[], bool]
    stop_timeout_s: float
    death_signal: signal.Signals = signal.SIGKILL
    environ: dict[str, str] = field(default_factory=dict)
    retire_signal: signal.Signals = signal.SIGTERM
    hand_over: Callable[[], Inherited] | None = None
    on_end: Callable[[int], None] | None = None


@dataclass(slots=True, eq=False)
class _Child:
    """`is_needed`: the fleet ends with it. `error` is why it could not be kept up."""

    spec: ChildSpec
    history: RestartHistory
    is_needed: bool
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    error: ChildFailedError | None = None
    process: asyncio.subprocess.Process | None = None
    has_been_ready: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    is_terminated: bool = False
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
        self._leaving: set[_Child] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._force = asyncio.Event()
        adopt_orphans()

    def use_policy(self, policy: RestartPolicy) -> None:
        """Restart all children by another policy from now on."""
        self._policy = policy
        for child in self._children.values():
            child.history.policy = policy

    def start(self, spec: ChildSpec, *, is_needed: bool = True) -> None:
        """Start a child and keep it running until `stop`. Call from the main thread.

        One that `is_needed` fails the fleet when it cannot be kept up; see `need`.
        """
        child = _Child(spec, RestartHistory(self._policy), is_needed)
        self._children[spec.name] = child
        child.task = asyncio.create_task(self._keep_running(child), name=f"keep {spec.name}")

    def need(self, name: str) -> None:
        """Let the fleet fail from now on when this child cannot be kept up."""
        child = self._children[name]
        child.is_needed = True
        if child.error is not None:
            self._fail(child, child.error)

    async def replace(self, spec: ChildSpec, *, timeout_s: float) -> None:
        """Start a child beside the one of its name, which retires once the new one is ready.

        Raises ChildFailedError when the new one does not get ready: then the old one goes on.
        """
        old = self._children[spec.name]
        self.start(spec, is_needed=False)
        new = self._children[spec.name]
        try:
            await self.wait_ready([spec.name], timeout_s=timeout_s)
        except BaseException:
            self._children[spec.name] = old
            self._leave(new, signal.SIGTERM)
            self._on_pid(spec.name, old.process.pid if old.process is not None else None)
            raise
        self.need(spec.name)
        self._leave(old, old.spec.retire_signal)

    def _leave(self, child: _Child, sig: signal.Signals) -> None:
        """Let a child whose place is taken end in its own time."""
        child.stopping.set()
        child.is_terminated = sig == signal.SIGTERM
        self._leaving.add(child)
        if child.process is not None:
            send_signal(child.process.pid, sig)
        assert child.task is not None
        child.task.add_done_callback(lambda _: self._leaving.discard(child))

    async def wait_ready(self, names: Iterable[str], *, timeout_s: float) -> None:
        """Wait until all are ready; raise ChildFailedError when one fails or takes too long."""
        children = [self._children[name] for name in names]
        waiting = asyncio.gather(*(_become_ready(child) for child in children))
        try:
            watched: set[asyncio.Future[Any]] = {waiting, self._failure}
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            if waiting.done():
                waiting.result()
            late = [c.spec for c in children if not c.ready.is_set()]
            if late:
                raise ChildFailedError(
                    f"{late[0].name} is not ready after {timeout_s:g} s; see {late[0].log_file}",
                    exit_code=4,
                )
        finally:
            waiting.cancel()
            # Its end is taken notice of, so that the loop does not report it.
            await asyncio.gather(waiting, return_exceptions=True)

    def check(self, name: str) -> None:
        """Raise the ChildFailedError of a child that cannot be kept up."""
        error = self._children[name].error
        if error is not None:
            raise error

    async def wait_failure(self) -> None:
        """Wait for ever, or until a child cannot be kept up: then raise ChildFailedError."""
        await asyncio.shield(self._failure)

    def force(self) -> None:
        """Let `stop` kill instead of waiting for a drain, now and from now on."""
        self._force.set()

    async def stop(self, names: Iterable[str]) -> None:
        """End these children together and return when nothing is left of them."""
        wanted = set(names)
        known = [*self._children.values(), *self._leaving]
        children = [child for child in known if child.spec.name in wanted]
        await asyncio.gather(*(self._stop(child) for child in children))
        for child in children:
            # Only now: whoever is interrupted here leaves them to `stop_all`.
            self._children.pop(child.spec.name, None)

    async def stop_all(self, order: Iterable[Iterable[str]]) -> None:
        """End the children group by group, then whatever no group names."""
        for group in order:
            await self.stop(group)
        await self.stop([child.spec.name for child in (*self._children.values(), *self._leaving)])
        if self._failure.done():
            self._failure.exception()  # retrieved, so that the loop does not report it
        else:
            self._failure.cancel()

    async def _keep_running(self, child: _Child) -> None:
        try:
            await self._run_until_stopped(child)
        except ChildFailedError as error:
            self._fail(child, error)
        except (OSError, DependencyError) as error:
            text = f"cannot start {child.spec.name}: {error}"
            self._fail(child, ChildFailedError(text, exit_code=1))

    def _fail(self, child: _Child, error: ChildFailedError) -> None:
        child.error = error
        child.failed.set()
        if child.is_needed and not self._failure.done():
            self._failure.set_exception(error)

    def _note_pid(self, child: _Child) -> None:
        """Tell the pid of a child, unless another has taken its place."""
        if self._children.get(child.spec.name) is child:
            self._on_pid(child.spec.name, child.process.pid if child.process is not None else None)

    async def _run_until_stopped(self, child: _Child) -> None:
        spec = child.spec
        while not child.stopping.is_set():
            process = await spawn(
                spec.argv,
                spec.log_file,
                death_signal=spec.death_signal,
                environ=spec.environ,
                inherited=spec.hand_over() if spec.hand_over is not None else Inherited(),
            )
            child.process = process
            if child.stopping.is_set():  # asked for while the process was being made
                send_signal(process.pid, signal.SIGTERM)
            self._note_pid(child)
            probing = asyncio.create_task(self._probe(child), name=f"probe {spec.name}")
            code = await process.wait()
            probing.cancel()
            child.process = None
            child.ready.clear()
            self._note_pid(child)
            await end_group(process.pid)
            if not child.stopping.is_set():
                await self._back_off(child, code)

    async def _back_off(self, child: _Child, code: int) -> None:
        """Wait before the next start; raise ChildFailedError when there must be none."""
        spec, how = child.spec, in_words(code)
        if code in FINAL_EXIT_CODES and not child.has_been_ready:
            reason = last_line(spec.log_file)
            for prefix in ("prefixfleet: ", "prefixfleet gateway: ", "error: "):
                reason = reason.removeprefix(prefix)
            raise ChildFailedError(reason or f"{spec.name} {how}", exit_code=code)
        delay_s = child.history.next_delay_s(time.monotonic())
        if delay_s is None:
            raise ChildFailedError(
                f"{spec.name} {how} and has used up its {self._policy.budget} restarts within "
                f"{self._policy.window_s:g} s; see {spec.log_file}",
                exit_code=4,
            )
        ends = len(child.history.ends)
        if spec.on_end is not None:
            spec.on_end(ends)
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
        """End a child; being asked again while it ends does not hurry it."""
        child.stopping.set()
        if child.process is not None and not child.is_terminated:
            send_signal(child.process.pid, signal.SIGTERM)
        child.is_terminated = True
        assert child.task is not None
        await self._wait_or_force(child.task, child.spec.stop_timeout_s)
        if child.process is not None:
            self._say(f"{child.spec.name} does not stop; killing it")
            signal_group(child.process.pid, signal.SIGKILL)
        await asyncio.shield(child.task)

    async def _wait_or_force(self, task: asyncio.Task[None], timeout_s: float) -> None:
        forced = asyncio.create_task(self._force.wait())
        try:
            watched: set[asyncio.Future[Any]] = {task, forced}
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forced.cancel()


async def _become_ready(child: _Child) -> None:
    """Wait until a child is ready; raise ChildFailedError when it cannot be kept up."""
    waits = {asyncio.create_task(event.wait()) for event in (child.ready, child.failed)}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if child.error is not None:
        raise child.error


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but no longer than `timeout_s`."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
