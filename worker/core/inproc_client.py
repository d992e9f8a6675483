"""An engine core on the caller's own event loop: for tests and small tools.

Each step blocks the loop, so it suits executors that cost microseconds. It has no process to die
and publishes no events; whoever needs those uses ProcessClient.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from engine.core import EngineCore
from engine.frontend.errors import RequestError
from engine.messages import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    PauseMode,
    PoolSnapshot,
    SleepLevel,
    TenantStats,
)
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from worker.core.client import EngineClient
from worker.core.output_router import OutputRouter, refusal

_log = logging.getLogger("prefixfleet.core_client")


class AsyncInprocClient:
    """EngineClient over an EngineCore of this process.

    Made by `await AsyncInprocClient.start(core, clock)`, ended by `close`.
    """

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self.core = core
        self._clock = clock
        self._router = OutputRouter()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.dead_reason: str | None = None
        self.info = core.info(boot_ns=int(clock.now() * 1e9))

    @classmethod
    async def start(cls, core: EngineCore, clock: Clock) -> AsyncInprocClient:
        """Start stepping whenever there is work."""
        client = cls(core, clock)
        client._task = asyncio.create_task(client._run(), name="engine-core")
        return client

    @property
    def stats(self) -> EngineStats:
        """The statistics of this instant."""
        return self.core.stats()

    @property
    def last_heard_at(self) -> float:
        """Now: a core in this process is heard whenever it is asked."""
        return self._clock.monotonic()

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
        try:
            self.core.add(request)
            self._work.set()
            async for output in self._router.outputs(request.request_id):
                yield output
        finally:
            if not self._router.close(request.request_id):
                self.core.abort([request.request_id])

    async def extend_prompt(
        self, request_id: str, token_ids: Sequence[int], *, is_last: bool
    ) -> None:
        """Append to an open prompt; see EngineClient."""
        try:
            self.core.extend_prompt(request_id, list(token_ids), is_last=is_last)
        except RequestError as error:
            self.core.abort([request_id])
            self._router.deliver([refusal(request_id, error)])
        self._work.set()

    async def snapshots(self) -> list[PoolSnapshot]:
        """Return every cached block; there is no event stream, so `seq` is -1."""
        entries = self.core.snapshot_entries()
        return [PoolSnapshot(boot_ns=self.info.boot_ns, seq=-1, entries=entries)]

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; see EngineClient."""
        return self.core.reset_prefix_cache(preempt_running=preempt_running)

    async def pause(self, mode: PauseMode) -> None:
        """Stop admitting, or computing; see EngineClient."""
        self.core.pause(mode)

    async def resume(self) -> None:
        """Go on after a pause."""
        self.core.resume()
        self._work.set()

    async def resize(self, num_blocks: int) -> int:
        """Make the KV cache larger or smaller; see EngineClient."""
        self._router.deliver(self.core.resize(num_blocks))
        return self.core.kv_cache.pool.num_blocks

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back until `wake_up`; see EngineClient."""
        try:
            self._router.deliver(self.core.sleep(level))
        except ConfigError as error:
            raise RequestError("conflict", str(error)) from None

    async def wake_up(self) -> None:
        """Go on after a sleep."""
        self.core.wake_up()
        self._work.set()

    async def update_weights(self, model_folder: str) -> None:
        """Go on with other weights; see EngineClient."""
        try:
            outputs, problem = self.core.update_weights(model_folder)
        except ConfigError as error:
            raise RequestError("conflict", str(error)) from None
        self._router.deliver(outputs)
        self.info = self.core.info(boot_ns=self.info.boot_ns)
        self._work.set()
        if problem is not None:
            raise RequestError("conflict", problem)

    async def tenant_stats(self) -> dict[str, TenantStats]:
        """Return each tenant's share; see EngineClient."""
        return self.core.tenant_stats()

    async def close(self) -> None:
        """Stop stepping; live requests end with `engine_dead`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.dead_reason = self.dead_reason or "the engine was closed"
        self._router.fail(self.dead_reason)
        self.core.executor.close()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self.core.has_work:
                try:
                    outputs = self.core.step()
                except Exception as error:  # noqa: BLE001  (the core ends here; whoever waits is told)
                    _log.exception("engine core failed")
                    self.dead_reason = f"{type(error).__name__}: {error}"
                    self._router.fail(self.dead_reason)
                    return
                self.core.take_events()
                self._router.deliver(outputs)
                await asyncio.sleep(0)
