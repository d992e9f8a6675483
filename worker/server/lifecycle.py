"""The life of a replica's front: listen, load, serve, drain, end.

The port is bound first and /health says 503 until the engine, which is starting already, can serve.
A dead engine ends the process, for whoever supervises it to start anew. It knows no endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from engine.frontend.encoder import Encoder
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import load_bundle
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from kvindex.foundation.logs import quoted
from worker.core.client import EngineClient
from worker.core.garbage import settle_after_loading
from worker.server.app import build_app
from worker.server.engine_start import EngineStart
from worker.server.front import ReplicaFront
from worker.server.registration import registered
from worker.server.stop_signals import StopSignals

_log = logging.getLogger("prefixfleet.replica")

_POLL_S = 0.1
_CUT_OFF_S = 1.0
EXIT_OK = 0
EXIT_ENGINE_DEAD = 1


async def serve(start: EngineStart, stop: StopSignals) -> int:
    """Run a replica until it is told to stop or its engine dies; return the exit code.

    Raises ConfigError for a model folder that cannot be used, DependencyError for a port in use
    and for an engine that does not start.
    """
    spec, clock = start.spec, SystemClock()
    front = ReplicaFront(spec, load_bundle(Path(spec.model_folder)), clock)
    try:
        async with _listening(front):
            try:
                return await _load_and_serve(front, start, stop)
            finally:
                await start.close()  # Whoever still waits for it is told so.
    finally:
        front.close()


async def _load_and_serve(front: ReplicaFront, start: EngineStart, stop: StopSignals) -> int:
    loading = asyncio.create_task(_load(front, start), name="load")
    if not await _ends_before(loading, stop.drain):
        return EXIT_OK
    client = loading.result()
    async with registered(front, client):
        _log.info("ready load_s=%.1f url=%s", time.monotonic() - start.began_at, front.url)
        return await _serve_until_end(front, client, stop)


async def _load(front: ReplicaFront, start: EngineStart) -> EngineClient:
    encoder = await asyncio.to_thread(Encoder, front.bundle)
    start.encoder.set_result(encoder)
    for name, path in front.spec.lora_adapters.items():
        front.adapters.add(await asyncio.to_thread(front.adapters.check, name, path))
    settle_after_loading()
    client = await start.client()
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
