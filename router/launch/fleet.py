"""Runs a planned fleet in the foreground: start in order, keep up, reload when asked, drain, end.

Redis comes first and goes last; replicas before the gateway, which goes first. It decides order
and reports progress; keeping single processes alive is the supervisor's.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from kvindex.redis_connect import check_server, connect
from router.launch import embedded_redis
from router.launch.control import Control
from router.launch.fleet_file import FleetFile, write_fleet_file
from router.launch.live_fleet import LiveFleet
from router.launch.plan import FleetPlan
from router.launch.progress import Progress
from router.launch.reload import Reloader
from router.launch.run_dir import RunDirectory

EXIT_INTERRUPTED = 130
# Long enough to load a large append-only file.
_REDIS_READY_S = 60.0


class Fleet:
    """One fleet, from its start to its end; `on_ready` speaks to the person who started it."""

    def __init__(
        self,
        plan: FleetPlan,
        file: FleetFile,
        *,
        run_dir: RunDirectory,
        progress: Progress,
        on_ready: Callable[[], None],
    ) -> None:
        self._run_dir = run_dir
        self._progress = progress
        self._on_ready = on_ready
        self._live = LiveFleet(plan, file, run_dir=run_dir, say=progress.say)
        self._supervisor = self._live.supervisor
        self._control = Control(run_dir.control_socket, Reloader(self._live).reload)
        self._stop_signal: asyncio.Future[signal.Signals] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(self) -> int:
        """Run until a signal (0, or 130 for SIGINT); raise ChildFailedError when it cannot."""
        self._watch_signals()
        serving = asyncio.create_task(self._serve(), name="serve")
        try:
            watched: set[asyncio.Future[Any]] = {serving, self._stop_signal}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # it ends only by raising
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._control.close()
            await self._stop()
        return EXIT_INTERRUPTED if self._stop_signal.result() is signal.SIGINT else 0

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._on_signal, sig)

    def _on_signal(self, sig: signal.Signals) -> None:
        if self._stop_signal.done():
            self._progress.say(f"{sig.name} again: killing what still runs")
            self._supervisor.force()
        else:
            self._progress.say(f"{sig.name}: draining; once more to kill")
            self._stop_signal.set_result(sig)

    async def _serve(self) -> None:
        """Start everything in order, then watch; returns only by raising."""
        live, timeout_s = self._live, self._live.plan.fleet.ready_timeout_s
        self._run_dir.create_socket_dir()
        await self._start_redis()
        self._progress.say(f"replicas: {len(live.plan.replicas)} of {live.file.model} …")
        for settings in live.plan.replicas:
            self._supervisor.start(live.replica_child(settings))
        await self._supervisor.wait_ready(live.replica_names, timeout_s=timeout_s)
        self._progress.say("gateway …")
        live.seats.open()
        for number in range(live.plan.gateway.router.processes):
            self._supervisor.start(live.gateway_child(number))
        await self._supervisor.wait_ready(live.gateway_names, timeout_s=timeout_s)
        await self._control.start()
        live.file.ready = True
        write_fleet_file(self._run_dir, live.file)
        self._on_ready()
        await self._supervisor.wait_failure()

    async def _start_redis(self) -> None:
        plan = self._live.plan
        if plan.starts_redis:
            self._progress.say("embedded Redis …")
            self._supervisor.start(embedded_redis.child_spec(self._run_dir))
            await self._supervisor.wait_ready([embedded_redis.NAME], timeout_s=_REDIS_READY_S)
        for url, must_persist in plan.stores:
            client = connect(url, plan.redis)
            try:
                warnings = await check_server(client, must_persist=must_persist)
            finally:
                await client.aclose()
            for warning in warnings:
                self._progress.say(f"warning: {warning}")

    async def _stop(self) -> None:
        live = self._live
        live.seats.close()
        await self._supervisor.stop_all(
            [live.gateway_names, live.replica_names, [embedded_redis.NAME]]
        )
        self._run_dir.remove_sockets()
        if live.file.ready:
            live.file.clear()
            write_fleet_file(self._run_dir, live.file)
        self._progress.say("stopped: no process is left")
