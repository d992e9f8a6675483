"""The life of a replica's front: listen, load, serve, drain, end.

The port is bound first and /health says 503 until the engine can serve. A dead engine ends the
process, for whoever supervises it to start anew. It knows no endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from aiohttp import web

from engine.frontend.encoder import Encoder
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import load_bundle
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from kvindex.foundation.logs import quoted
from worker.core.client import EngineClient
from worker.server.app import build_app
from worker.server.engine_start import start_engine
from worker.server.front import ReplicaFront
from worker.server.registration import registered
from worker.server.spec import ReplicaSpec

_log = logging.getLogger("prefixfleet.replica")

_POLL_S = 0.1
_CUT_OFF_S = 1.0
EXIT_OK = 0
EXIT_ENGINE_DEAD = 1


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


async def serve(spec: ReplicaSpec, stop: StopSignals) -> int:
    """Run a replica until it is told to stop or its engine dies; return the exit code.

    Raises ConfigError for a model folder that cannot be used, DependencyError for a port in use
    and for an engine that does not start.
    """
    clock = SystemClock()
    front = ReplicaFront(spec, load_bundle(Path(spec.model_folder)), clock)
    try:
        async with _listening(front):
            with _socket_dir(spec) as socket_dir:
                return await _load_and_serve(front, socket_dir, stop)
    finally:
        front.close()


async def _load_and_serve(front: ReplicaFront, socket_dir: Path, stop: StopSignals) -> int:
    started = time.monotonic()
    loading = asyncio.create_task(_load(front, socket_dir), name="load")
    if not await _ends_before(loading, stop.drain):
        return EXIT_OK
    client = loading.result()
    try:
        async with registered(front, client):
            _log.info("ready load_s=%.1f url=%s", time.monotonic() - started, front.url)
            return await _serve_until_end(front, client, stop)
    finally:
        await client.close()


async def _load(front: ReplicaFront, socket_dir: Path) -> EngineClient:
    encoder = await asyncio.to_thread(Encoder, front.bundle)
    for name, path in front.spec.lora_adapters.items():
        front.adapters.add(await asyncio.to_thread(front.adapters.check, name, path))
    client = await start_engine(front.spec, encoder, socket_dir)
    max_model_len = client.info.max_model_len
    prompts = PromptEncoder(
        front.bundle, encoder=encoder, clock=front.clock, max_model_len=max_model_len
    )
    front.become_ready(client, prompts)
    return client


async def _serve_until_end(front: ReplicaFront, client: EngineClient, stop: StopSignals) -> int:
    await _until(lambda: client.dead_reason is not None or stop.drain.is_set())
    if client.dead_reason is not None:
        _log.error("engine is dead reason=%s", quoted(client.dead_reason))
        front.become_dead(client.dead_reason)
        await _wait_idle(front, _CUT_OFF_S, stop)
        return EXIT_ENGINE_DEAD
    front.become_draining()
    front.report_now()
    _log.info("draining active=%d timeout_s=%g", front.num_active, front.spec.drain_timeout_s)
    await _wait_idle(front, front.spec.drain_timeout_s, stop)
    _log.info("stopped cut_off=%d", front.num_active)
    return EXIT_OK


async def _wait_idle(front: ReplicaFront, timeout_s: float, stop: StopSignals) -> None:
    """Wait until no generation is in flight, the time is up, or a second signal comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await _until(lambda: front.num_active == 0 or stop.at_once.is_set())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (the engine client's death is a plain attribute)
        await asyncio.sleep(_POLL_S)


async def _ends_before(task: asyncio.Task[EngineClient], event: asyncio.Event) -> bool:
    """Wait for a task or an event; cancel the task and return False when the event is first."""
    waiting = asyncio.create_task(event.wait(), name="stop-signal")
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _listening(front: ReplicaFront) -> AsyncIterator[None]:
    """Bind the port and answer; DependencyError when it is not to be had."""
    spec = front.spec
    runner = web.AppRunner(
        build_app(front),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CUT_OFF_S,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, spec.host, spec.port).start()
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            remedy = "it is in use; choose another port" if in_use else error.strerror
            raise DependencyError(f"cannot listen on {spec.host}:{spec.port}: {remedy}") from None
        front.port = runner.addresses[0][1]
        _log.info("listening host=%s port=%d", spec.host, front.port)
        yield
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def _socket_dir(spec: ReplicaSpec) -> Iterator[Path]:
    """Give the folder of this replica's local sockets; a temporary one goes away afterwards."""
    if spec.socket_dir is not None:
        yield Path(spec.socket_dir)
        return
    folder = Path(tempfile.mkdtemp(prefix="prefixfleet-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
