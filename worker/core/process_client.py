"""Starts an engine-core process and talks to it over two local sockets.

The core's death is noticed at once (its process is awaited) and ends every request with
`engine_dead`; nothing is restarted here, that is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from engine.frontend.errors import RequestError
from engine.messages import (
    AbortRequests,
    AddRequests,
    CoreDead,
    CoreOutputs,
    CoreReady,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FromCore,
    PoolSnapshot,
    Shutdown,
    ToCore,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from kvindex.foundation.die_with_parent import wrap
from kvindex.foundation.errors import DependencyError
from worker.core.output_router import OutputRouter
from worker.core.spec import CoreSpec

_log = logging.getLogger("prefixfleet.core_client")
_CLOSE_TIMEOUT_S = 5.0


class ProcessClient:
    """EngineClient over an engine-core process; made by `await ProcessClient.start(...)`."""

    def __init__(self, process: asyncio.subprocess.Process, sockets: _Sockets) -> None:
        self._process = process
        self._sockets = sockets
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._router = OutputRouter()
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_calls = 0
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._tasks = [
            asyncio.create_task(self._read(), name="core-output"),
            asyncio.create_task(self._watch(), name="core-exit"),
        ]
        self.stats = EngineStats()
        self.last_heard_at = time.monotonic()
        self.dead_reason: str | None = None
        self.info: EngineInfo  # set once the core is ready

    @classmethod
    async def start(
        cls, spec: CoreSpec, *, socket_dir: Path, start_timeout_s: float = 300.0
    ) -> ProcessClient:
        """Start the core and wait until it can serve.

        The endpoints of `spec` are replaced by sockets in `socket_dir`, a folder of this replica
        alone. Raises DependencyError when the core ends or stays silent instead; nothing of it is
        left then.
        """
        sockets = _Sockets(socket_dir)
        spec = msgspec.structs.replace(
            spec, input_endpoint=sockets.input_endpoint, output_endpoint=sockets.output_endpoint
        )
        argv = [sys.executable, "-P", "-m", "worker.core.process"]
        process = await asyncio.create_subprocess_exec(
            *wrap(argv, signal.SIGKILL), stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        client = cls(process, sockets)
        try:
            process.stdin.write(msgspec.json.encode(spec))
            process.stdin.close()
            async with asyncio.timeout(start_timeout_s):
                client.info = await asyncio.shield(client._ready)
        except TimeoutError:
            await client.close()
            raise DependencyError(
                f"the engine core of {spec.replica_id} was not ready in {start_timeout_s:.0f} s"
            ) from None
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run a request; see EngineClient."""
        self._router.open(request.request_id)
        sent = False
        try:
            await self._send(AddRequests(requests=[request]))
            sent = True
            async for output in self._router.outputs(request.request_id):
                yield output
        finally:
            finished = self._router.close(request.request_id)
            if sent and not finished and self.dead_reason is None:
                await self._send(AbortRequests(request_ids=[request.request_id]))

    async def snapshot(self) -> PoolSnapshot:
        """Return every cached block as of a step border."""
        result = await self._call(method="snapshot")
        assert result.snapshot is not None
        return result.snapshot

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; see EngineClient."""
        result = await self._call(method="reset_prefix_cache", preempt_running=preempt_running)
        return bool(result.ok)

    async def close(self) -> None:
        """End the core: politely, then by force; leaves no process and no socket."""
        if self._closing:
            return
        self._closing = True
        if self._process.returncode is None and self.dead_reason is None:
            with contextlib.suppress(zmq.ZMQError):
                await self._send(Shutdown())
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                _log.warning("engine core pid=%d did not end in time, killed", self.pid)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._die("the engine was closed")
        self._sockets.close()

    async def _call(self, *, method: UtilityMethod, preempt_running: bool = False) -> UtilityResult:
        if self.dead_reason is not None:
            raise RequestError("engine_dead", self.dead_reason)
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        call = UtilityCall(call_id=call_id, method=method, preempt_running=preempt_running)
        try:
            await self._send(call)
            return await future
        finally:
            del self._calls[call_id]

    async def _send(self, message: ToCore) -> None:
        await self._sockets.input.send(self._encoder.encode(message))

    async def _read(self) -> None:
        """Take in what the core sends, until this client is closed."""
        while True:
            message = self._decoder.decode(await self._sockets.output.recv())
            self.last_heard_at = time.monotonic()
            match message:
                case CoreOutputs(outputs=outputs, stats=stats):
                    self.stats = stats
                    self._router.deliver(outputs)
                case UtilityResult(call_id=call_id):
                    future = self._calls.get(call_id)
                    if future is not None and not future.done():
                        future.set_result(message)
                case CoreReady(info=info):
                    if not self._ready.done():
                        self._ready.set_result(info)
                case CoreDead(error=error):
                    self._die(f"the engine core failed: {error}")

    async def _watch(self) -> None:
        code = await self._process.wait()
        if not self._closing:
            # A last message may still be on its way; it names the reason better than a number.
            await asyncio.sleep(0.1)
            self._die(f"the engine core ended with exit code {code}")

    def _die(self, reason: str) -> None:
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if not self._closing:
            _log.error("engine core is gone reason=%r", reason)
        self._router.fail(reason)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(RequestError("engine_dead", reason))
        if not self._ready.done():
            self._ready.set_exception(DependencyError(reason))
            self._ready.exception()  # seen: `start` may have given up already


class _Sockets:
    """The two sockets of a front; their files live in a folder of this replica alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files = [folder / "core-in.sock", folder / "core-out.sock"]
        self.input_endpoint, self.output_endpoint = (f"ipc://{file}" for file in self._files)
        self._context = zmq.asyncio.Context()
        self.input = self._context.socket(zmq.PUSH)
        self.input.setsockopt(zmq.SNDHWM, 0)
        self.output = self._context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVHWM, 0)
        for file in self._files:
            file.unlink(missing_ok=True)
        self.input.bind(self.input_endpoint)
        self.output.bind(self.output_endpoint)

    def close(self) -> None:
        """Close the sockets and remove their files."""
        self.input.close(linger=0)
        self.output.close(linger=0)
        self._context.term()
        for file in self._files:
            file.unlink(missing_ok=True)
