"""Several engine cores behind one front: each has the whole model and a KV cache of its own.

The cores know nothing of each other, so the death of one fails its requests alone and the others
go on. A dead core is started again, after growing delays; its cache starts empty. Who reads the
KV events of which rank is the front's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import cast

from engine.frontend.errors import RequestError
from engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PauseMode,
    PoolSnapshot,
    SleepLevel,
    TenantStats,
)
from kvindex.foundation.errors import DependencyError
from worker.core.client import EngineClient
from worker.core.rank_balancer import RankBalancer
from worker.core.rank_sums import sum_stats, sum_tenant_stats

_log = logging.getLogger("prefixfleet.data_parallel")
_DEATH_POLL_S = 0.1
_SILENT_S = 5.0
FIRST_RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0

StartCore = Callable[[int], Awaitable[EngineClient]]
"""Starts the core of a rank; raises DependencyError when it cannot, and leaves nothing then."""


class DataParallelClient:
    """EngineClient over one core per rank; made by `await DataParallelClient.start(...)`.

    Without a named rank a request goes where least is queued; cores that have been silent for a
    while get none unless all are. `max_step_tokens` is what one step of a core computes at most.
    """

    def __init__(
        self, ranks: Sequence[EngineClient], *, start_core: StartCore, max_step_tokens: int
    ) -> None:
        self._ranks = list(ranks)
        self._start_core = start_core
        self._balancer = RankBalancer(len(ranks), max_step_tokens=max_step_tokens)
        self._num_requests = 0
        self._sleep_level: SleepLevel | None = None
        self._model_folder: str | None = None
        self._rank_of: dict[str, int] = {}
        self._restarting = [
            asyncio.create_task(self._keep_running(rank), name=f"core-{rank}")
            for rank in range(len(ranks))
        ]

    @classmethod
    async def start(
        cls, num_ranks: int, start_core: StartCore, *, max_step_tokens: int
    ) -> DataParallelClient:
        """Start all cores side by side; when one cannot, end the others and raise its error."""
        starting = [asyncio.ensure_future(start_core(rank)) for rank in range(num_ranks)]
        try:
            ranks = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            ended = await asyncio.gather(*starting, return_exceptions=True)
            started = [end for end in ended if not isinstance(end, BaseException)]
            await asyncio.gather(*(client.close() for client in started))
            raise
        return cls(ranks, start_core=start_core, max_step_tokens=max_step_tokens)

    @property
    def ranks(self) -> Sequence[EngineClient]:
        """The newest core of every rank; a dead one stays until another has taken its place."""
        return self._ranks

    @property
    def info(self) -> EngineInfo:
        """What the first core said; the others differ in boot time and endpoints alone."""
        return self._ranks[0].info

    @property
    def stats(self) -> EngineStats:
        """The sums over all ranks; totals start anew for a core that was started again."""
        return sum_stats([client.stats for client in self._ranks])

    @property
    def last_heard_at(self) -> float:
        """Monotonic instant of the newest message of any core."""
        return max(client.last_heard_at for client in self._ranks)

    @property
    def dead_reason(self) -> str | None:
        """Why there is no core left, None while one lives."""
        reasons = [client.dead_reason for client in self._ranks]
        if None in reasons:
            return None
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons))

    def choose_rank(self) -> int:
        """Return the least loaded of the living ranks; RequestError when there is none."""
        living = [rank for rank, client in enumerate(self._ranks) if client.dead_reason is None]
        if not living:
            raise RequestError("engine_dead", self.dead_reason or "every engine core is gone")
        now = time.monotonic()
        heard = [r for r in living if now - self._ranks[r].last_heard_at <= _SILENT_S]
        return self._balancer.choose(heard or living)

    async def generate(
        self, request: EngineRequest, *, dp_rank: int | None = None, interval: int = 1
    ) -> AsyncIterator[EngineOutput]:
        """Run a request; see EngineClient. RequestError for a rank that does not exist."""
        if request.request_id in self._rank_of:
            raise RequestError("invalid_request", f"request id {request.request_id} is in use")
        rank = self.choose_rank() if dp_rank is None else self._named(dp_rank)
        self._num_requests += 1
        key = self._num_requests
        self._balancer.begin(rank, key, num_prompt_tokens=len(request.prompt_token_ids))
        self._rank_of[request.request_id] = rank
        try:
            # The protocol promises an iterator whose closing aborts; all of ours are generators.
            source = cast(
                "AsyncGenerator[EngineOutput, None]",
                self._ranks[rank].generate(request, interval=interval),
            )
            async with aclosing(source) as outputs:
                async for output in outputs:
                    self._balancer.prefilled(rank, key)
                    yield output
        finally:
            self._balancer.end(rank, key)
            del self._rank_of[request.request_id]

    async def extend_prompt(
        self, request_id: str, token_ids: Sequence[int], *, is_last: bool
    ) -> None:
        """Append to an open prompt where it runs; see EngineClient."""
        rank = self._rank_of.get(request_id)
        if rank is not None:
            await self._ranks[rank].extend_prompt(request_id, token_ids, is_last=is_last)

    async def snapshots(self) -> list[PoolSnapshot]:
        """Return what every living core has cached, by rank."""
        found = await asyncio.gather(*(client.snapshots() for client in self._living))
        return [snapshot for snapshots in found for snapshot in snapshots]

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget the cached blocks of every core; False when any has requests that hold some."""
        done = await asyncio.gather(
            *(client.reset_prefix_cache(preempt_running=preempt_running) for client in self._living)
        )
        return all(done)

    async def pause(self, mode: PauseMode) -> None:
        """Pause every living core; one that is started again is not paused."""
        await asyncio.gather(*(client.pause(mode) for client in self._living))

    async def resume(self) -> None:
        """Let every core go on."""
        await asyncio.gather(*(client.resume() for client in self._living))

    async def resize(self, num_blocks: int) -> int:
        """Make every KV cache larger or smaller; return the blocks of the smallest."""
        return min(await asyncio.gather(*(one.resize(num_blocks) for one in self._living)))

    async def sleep(self, level: SleepLevel) -> None:
        """Let every living core sleep, and those that are started again meanwhile."""
        await asyncio.gather(*(client.sleep(level) for client in self._living))
        self._sleep_level = level

    async def wake_up(self) -> None:
        """Let every core go on."""
        self._sleep_level = None
        await asyncio.gather(*(client.wake_up() for client in self._living))

    async def update_weights(self, model_folder: str) -> None:
        """Replace the weights of every core, one after the other; see EngineClient.

        The first that refuses leaves those before it with the new ones: they agree again when the
        call is repeated with either folder, and the error says so.
        """
        for num_changed, client in enumerate(self._living):
            try:
                await client.update_weights(model_folder)
            except RequestError as error:
                if not num_changed:
                    raise
                raise RequestError(
                    error.kind,
                    f"{num_changed} of {len(self._ranks)} cores have the weights of "
                    f"{model_folder}, the next one does not: {error.message}; repeat it with "
                    "either folder",
                ) from None
        self._sleep_level, self._model_folder = None, model_folder

    async def tenant_stats(self) -> dict[str, TenantStats]:
        """Return the sums over all ranks by tenant."""
        found = await asyncio.gather(*(client.tenant_stats() for client in self._living))
        tenants = {tenant for one in found for tenant in one}
        return {
            tenant: sum_tenant_stats([one[tenant] for one in found if tenant in one])
            for tenant in tenants
        }

    async def close(self) -> None:
        """End every core; also one that is just being started again."""
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._ranks))

    @property
    def _living(self) -> list[EngineClient]:
        return [client for client in self._ranks if client.dead_reason is None]

    def _named(self, dp_rank: int) -> int:
        """Return the named rank, another one when its core is dead: its cache is gone anyway."""
        if not 0 <= dp_rank < len(self._ranks):
            raise RequestError(
                "invalid_request", f"there is no rank {dp_rank}; ranks are below {len(self._ranks)}"
            )
        return dp_rank if self._ranks[dp_rank].dead_reason is None else self.choose_rank()

    async def _start_like_the_others(self, rank: int) -> EngineClient:
        """Start a rank's core with the weights that the others have, and asleep if they are."""
        client = await self._start_core(rank)
        try:
            if self._model_folder is not None:
                await client.update_weights(self._model_folder)
            if self._sleep_level is not None:
                await client.sleep(self._sleep_level)
        except BaseException:
            await client.close()
            raise
        return client

    async def _keep_running(self, rank: int) -> None:
        """Start a rank's core again whenever it dies; when all are dead, the front ends first."""
        delay_s = FIRST_RESTART_DELAY_S
        while True:
            started_at = time.monotonic()
            client = self._ranks[rank]
            while client.dead_reason is None:  # noqa: ASYNC110  (a plain attribute)
                await asyncio.sleep(_DEATH_POLL_S)
            await client.close()
            if time.monotonic() - started_at > MAX_RESTART_DELAY_S:
                delay_s = FIRST_RESTART_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)
            try:
                self._ranks[rank] = await self._start_like_the_others(rank)
            except (DependencyError, RequestError) as error:
                _log.error("rank not restarted rank=%d reason=%r", rank, str(error))
                continue
            _log.warning("rank restarted rank=%d", rank)
