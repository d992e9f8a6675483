"""Keeps the processes of one gateway running on one port: the parent of `router.processes` > 1.

It has a seat for each of them, so that a connection which waits for a process that died is served
by the next one. It serves nothing itself; under `prefixfleet up` the supervisor has the seats.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvindex.config import EMBEDDED
from kvindex.foundation.die_with_parent import wrap
from kvindex.foundation.errors import ConfigError
from router.config import GatewaySpec
from router.launch.gateway_seats import GatewaySeats, fds_of
from router.launch.process_group import in_words, send_signal
from router.launch.restart import RestartHistory, RestartPolicy
from router.launch.supervisor import FINAL_EXIT_CODES, ChildFailedError, wait_event
from router.seat import Seat

log = logging.getLogger("prefixfleet.router.processes")

_POLICY = RestartPolicy(initial_s=0.2, max_s=10.0, budget=20, window_s=300.0)
_DRAIN_MARGIN_S = 3.0


@dataclass(slots=True)
class _Place:
    """One seat, and the process in it now."""

    number: int
    history: RestartHistory = field(default_factory=lambda: RestartHistory(_POLICY))
    pid: int | None = None


def check_processes(spec: GatewaySpec) -> None:
    """Raise ConfigError when several processes would have nothing to share limits in."""
    if spec.router.processes > 1 and spec.redis.resolved_state_url == EMBEDDED:
        raise ConfigError(
            "router.processes: several processes share tenants, limits and decisions in Redis; "
            "name one in redis.index_url or redis.state_url, or use one process"
        )


class GatewayProcesses:
    """The processes of one gateway; `spec_file` is what each of them reads."""

    def __init__(self, spec: GatewaySpec, spec_file: Path) -> None:
        self._spec = spec
        self._spec_file = spec_file
        self._folder = Path(tempfile.mkdtemp(prefix="prefixfleet-gw-"))
        self._seats = GatewaySeats(spec.router, self._folder)
        self._stopping = asyncio.Event()
        self._places = [_Place(number) for number in range(spec.router.processes)]

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, then let all drain.

        Raises DependencyError when a port is taken, ChildFailedError when a process cannot be
        kept up.
        """
        self._watch_signals()
        try:
            self._seats.open()
            async with asyncio.TaskGroup() as group:
                for place in self._places:
                    group.create_task(self._keep(place))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._seats.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._tell, signal.SIGHUP)

    def _stop(self) -> None:
        """Let every process drain. Who is still accepted is answered by those that drain."""
        self._stopping.set()
        self._seats.close()
        self._tell(signal.SIGTERM)

    def _tell(self, number: signal.Signals) -> None:
        for place in self._places:
            if place.pid is not None:
                send_signal(place.pid, number)

    async def _keep(self, place: _Place) -> None:
        """Have a process in a seat until the end; raise ChildFailedError when none stays."""
        while not self._stopping.is_set():
            seat = self._seats.seat(place.number)
            seat.socket_file.unlink(missing_ok=True)
            process = await self._spawn(seat)
            place.pid = process.pid
            if self._stopping.is_set():  # asked for while the process was being made
                send_signal(process.pid, signal.SIGTERM)
            code = await self._end_of(process)
            place.pid = None
            if not self._stopping.is_set():
                await self._back_off(place, code, has_served=seat.socket_file.exists())

    async def _spawn(self, seat: Seat) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-P", "-m", "router.gateway", "--seat"]
        argv += ["--config-json", str(self._spec_file)]
        process = await asyncio.create_subprocess_exec(
            *wrap(argv, signal.SIGTERM), stdin=asyncio.subprocess.PIPE, pass_fds=fds_of(seat)
        )
        assert process.stdin is not None, "asked for"
        process.stdin.write(msgspec.json.encode(seat))
        process.stdin.close()
        return process

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        """Wait for an end; once stopping, no longer than a drain may take."""
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            limit_s = self._spec.router.drain_timeout_s + _DRAIN_MARGIN_S
            await asyncio.wait((ended,), timeout=limit_s)
            if not ended.done():
                log.warning("process %d does not stop; killing it", process.pid)
                send_signal(process.pid, signal.SIGKILL)
            return await ended
        finally:
            stopping.cancel()
            if not ended.done():
                send_signal(process.pid, signal.SIGTERM)
                await ended

    async def _back_off(self, place: _Place, code: int, *, has_served: bool) -> None:
        """Wait before the next process; after a second end, others get the seat's connections."""
        if code in FINAL_EXIT_CODES and not has_served:
            raise ChildFailedError(f"process {place.number} cannot start", exit_code=code)
        delay_s = place.history.next_delay_s(time.monotonic())
        how = f"process {place.number} {in_words(code)}"
        if delay_s is None:
            raise ChildFailedError(f"{how} and has used up its restarts", exit_code=1)
        log.warning("%s; another one in %g s", how, delay_s)
        if len(place.history.ends) > 1:
            self._seats.give_up(place.number)
        await wait_event(self._stopping, delay_s)
