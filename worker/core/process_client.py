"""Starts an engine-core process and talks to it over two local sockets.

The core's death is noticed at once (its process is awaited) and ends every request with
`engine_dead`; nothing is restarted here, that is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import zmq

from engine.frontend.errors import RequestError
from engine.messages import (
    AbortRequests,
    AddRequests,
    AskTenantStats,
    CoreDead,
    CoreOutputs,
    CoreReady,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    ExtendPrompt,
    FallAsleep,
    FromCore,
    Pause,
    PauseMode,
    PoolSnapshot,
    ResetPrefixCache,
    Resize,
    Resume,
    Shutdown,
    SleepAnswer,
    SleepLevel,
    TakeSnapshot,
    TenantStats,
    ToCore,
    UpdateWeights,
    Utility,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from kvindex.foundation.errors import DependencyError
from worker.core.arrivals import Arrivals
from worker.core.client import EngineClient
from worker.core.core_link import CLOSE_TIMEOUT_S, AnswerT, CoreSockets, core_argv, decode
from worker.core.output_router import OutputRouter
from worker.core.spec import CoreSpec

_log = logging.getLogger("prefixfleet.core_client")


class ProcessClient:
    """EngineClient over an engine-core process; made by `await ProcessClient.start(...)`."""

    def __init__(
        self, process: asyncio.subprocess.Process, sockets: CoreSockets[zmq.Socket[bytes]]
    ) -> None:
        self._process = process
        self._sockets = sockets
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._arrivals = Arrivals(sockets.output)
        self._router = OutputRouter()
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._num_calls = 0
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._closing: asyncio.Task[None] | None = None
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

        The endpoints of `spec` are replaced by sockets in `socket_dir`, a folder of this core
        alone. Raises DependencyError when the core ends or stays silent instead; nothing of it is
        left then.
        """
        sockets = CoreSockets(socket_dir, zmq.Context())
        process = await asyncio.create_subprocess_exec(*core_argv(), stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        client = cls(process, sockets)
        try:
            process.stdin.write(sockets.told_to(spec))
            process.stdin.close()
            async with asyncio.timeout(start_timeout_s):
                client.info = await asyncio.shield(client._ready)
        except TimeoutError:
            await client.close()
            raise DependencyError(
                f"the engine core of {spec.replica_id} was not ready in {start_timeout_s:g} s"
            ) from None
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    @property
    def ranks(self) -> Sequence[EngineClient]:
        """This core alone."""
        return (self,)

    def choose_rank(self) -> int:
        """Return the only rank."""
        return 0

    async def generate(
        self, request: EngineRequest, *, dp_rank: int | None = None, interval: int = 1
    ) -> AsyncIterator[EngineOutput]:
        """Run a request; see EngineClient."""
        self._router.open(request.request_id, interval=interval)
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

    async def extend_prompt(
        self, request_id: str, token_ids: Sequence[int], *, is_last: bool
    ) -> None:
        """Append to an open prompt; see EngineClient."""
        await self._send(ExtendPrompt(request_id, list(token_ids), is_last))

    async def snapshots(self) -> list[PoolSnapshot]:
        """Return every cached block as of a step border."""
        return [await self._call(TakeSnapshot(), PoolSnapshot)]

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; see EngineClient."""
        return await self._call(ResetPrefixCache(preempt_running), bool)

    async def pause(self, mode: PauseMode) -> None:
        """Stop admitting, or computing; see EngineClient."""
        await self._call(Pause(mode), bool)

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._call(Resume(), bool)

    async def resize(self, num_blocks: int) -> int:
        """Make the KV cache larger or smaller; see EngineClient."""
        return await self._call(Resize(num_blocks), int)

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back until `wake_up`; see EngineClient."""
        await self._change(FallAsleep(level))

    async def wake_up(self) -> None:
        """Go on after a sleep."""
        await self._call(WakeUp(), bool)

    async def update_weights(self, model_folder: str) -> None:
        """Go on with other weights; see EngineClient."""
        await self._change(UpdateWeights(model_folder))

    async def _change(self, utility: FallAsleep | UpdateWeights) -> None:
        answer = await self._call(utility, SleepAnswer)
        self.info = answer.info
        if answer.problem is not None:
            raise RequestError("conflict", answer.problem)

    async def tenant_stats(self) -> dict[str, TenantStats]:
        """Return each tenant's share; see EngineClient."""
        return await self._call(AskTenantStats(), dict[str, TenantStats])

    async def close(self) -> None:
        """End the core: politely, then by force; leaves no process and no socket."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="core-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # A core that still loads reads no messages.
        is_listening = self._ready.done() and self.dead_reason is None
        if self._process.returncode is None and is_listening:
            await self._send(Shutdown())
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
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
        self._arrivals.stop()
        self._sockets.close()

    async def _call(self, utility: Utility, answer: type[AnswerT]) -> AnswerT:
        """Ask the core for something; RequestError when it dies before it answers."""
        if self.dead_reason is not None:
            raise RequestError("engine_dead", self.dead_reason)
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(UtilityCall(call_id=call_id, utility=utility))
            return msgspec.msgpack.decode(await future, type=answer)
        finally:
            del self._calls[call_id]

    async def _send(self, message: ToCore) -> None:
        # Nothing bounds the queue to the core, so this never waits.
        self._sockets.input.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        """Take in what the core sends, until this client is closed."""
        while True:
            message = decode(self._decoder, await self._arrivals.next(), _log)
            if message is not None:
                self.last_heard_at = time.monotonic()
                await self._take(message)

    async def _take(self, message: FromCore) -> None:
        match message:
            case CoreOutputs(outputs=outputs, stats=stats):
                self.stats = stats
                await self._router.deliver_in_slices(outputs)
            case UtilityResult(call_id=call_id, value=value):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(value)
            case CoreReady(info=info):
                if not self._ready.done():
                    self._ready.set_result(info)
            case CoreDead(error=error):
                self._die(f"the engine core failed: {error}")

    async def _watch(self) -> None:
        code = await self._process.wait()
        if self._closing is None:
            # A last message may still be on its way; it names the reason better than a number.
            await asyncio.sleep(0.1)
            self._die(f"the engine core ended with exit code {code}")

    def _die(self, reason: str) -> None:
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if self._closing is None:
            _log.error("engine core is gone reason=%r", reason)
        self._router.fail(reason)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(RequestError("engine_dead", reason))
        if not self._ready.done():
            self._ready.set_exception(DependencyError(reason))
            self._ready.exception()  # seen: `start` may have given up already
