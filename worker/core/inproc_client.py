"""An engine core on the caller's own event loop: for tests and small tools.

Each step blocks the loop, so it suits executors that cost microseconds. It has no process to die
and publishes no events; whoever needs those uses ProcessClient.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine.core import EngineCore
from engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats, PoolSnapshot
from kvindex.foundation.clock import Clock
from kvindex.hashing import known_answer
from worker.core.output_router import OutputRouter


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
        self.info = EngineInfo(
            boot_ns=int(clock.now() * 1e9),
            num_blocks=core.kv_cache.pool.num_usable,
            block_size=core.config.block_size,
            max_model_len=core.max_model_len,
            known_answer=known_answer(core.config.hash_scheme),
            execution_digest=core.executor.info.execution_digest,
            vocab_size=core.vocab_size,
        )

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

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run a request; see EngineClient."""
        self._router.open(request.request_id)
        try:
            self.core.add(request)
            self._work.set()
            async for output in self._router.outputs(request.request_id):
                yield output
        finally:
            if not self._router.close(request.request_id):
                self.core.abort([request.request_id])

    async def snapshot(self) -> PoolSnapshot:
        """Return every cached block; there is no event stream, so `seq` is -1."""
        return PoolSnapshot(boot_ns=self.info.boot_ns, seq=-1, entries=self.core.snapshot_entries())

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; see EngineClient."""
        return self.core.reset_prefix_cache(preempt_running=preempt_running)

    async def close(self) -> None:
        """Stop stepping; live requests end with `engine_dead`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._router.fail("the engine was closed")
        self.core.executor.close()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self.core.has_work:
                try:
                    outputs = self.core.step()
                except (AssertionError, RuntimeError, ValueError) as error:
                    self.dead_reason = f"{type(error).__name__}: {error}"
                    self._router.fail(self.dead_reason)
                    raise
                self.core.take_events()
                self._router.deliver(outputs)
                await asyncio.sleep(0)
