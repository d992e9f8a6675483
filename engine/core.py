"""The engine core: requests in, one step after the other, tokens and KV events out.

Synchronous and single-threaded; the process around it (worker/core) brings sockets and threads,
the simulator brings virtual time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.core_stats import engine_stats, tenant_stats
from engine.executor import Executor, OutOfDeviceMemoryError
from engine.frontend.errors import RequestError
from engine.invariants import check_integrity
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups.group import InFlight
from engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EventPlaces,
    PauseMode,
    SleepLevel,
    SnapshotEntry,
    TenantStats,
)
from engine.output import SchedulerOutput
from engine.request import Request
from engine.restore_cost import RestoreCost
from engine.resync import MAX_RESYNCS, Resync
from engine.scheduler import Scheduler
from engine.sleep import SHRUNK_BLOCKS, Sleep
from engine.spec_decode.planning import num_wrong_drafts
from engine.stats import EngineCounters, StepRates
from engine.step_stream import OutOfStepError
from engine.validate import ModelLimits
from kvindex.events import KVEvent
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import ConfigError
from kvindex.hashing import known_answer

logger = logging.getLogger("prefixfleet.engine.core")

_SHORTEST_SEQUENCE = 2


class EngineCore:
    """Scheduler, KV cache and executor of one engine.

    `max_model_len` is the executor's, further limited by the configuration and by what fits into
    the pool at all.
    """

    def __init__(self, config: EngineConfig, executor: Executor, clock: Clock) -> None:
        self.config = config
        self.executor = executor
        self._clock = clock
        info = executor.info
        pool = BlockPool(
            info.num_blocks,
            block_size=config.block_size,
            num_groups=len(info.kv_groups),
            num_host_blocks=config.num_host_blocks,
            shares=config.kv_shares,
            protected_share=config.protected_share,
        )
        self.rates = StepRates()
        self._restore_cost = RestoreCost(self.rates)
        self.kv_cache = KVCacheManager(
            pool,
            groups=info.kv_groups,
            enable_caching=config.enable_prefix_caching,
            in_flight=InFlight(
                max_step_tokens=config.max_num_batched_tokens, num_steps=1 + config.async_depth
            ),
            restore_cost=self._restore_cost,
        )
        self._min_blocks = self._smallest_size()
        self.vocab_size = info.vocab_size
        self.counters = EngineCounters()
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            max_model_len=self._longest_sequence(info.num_blocks),
            counters=self.counters,
        )
        self._in_flight: deque[_Submitted] = deque()
        self._resync = Resync()
        self._sleep = Sleep(executor)
        self._returned_at = 0.0
        self._num_steps = 0
        self._num_added = 0

    @property
    def max_model_len(self) -> int:
        """The most tokens that a sequence may have now."""
        return self.scheduler.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether a step would compute, tell the runner or bring back anything."""
        if self._sleep.level is not None:
            return False
        return self.scheduler.can_go_on or bool(self._in_flight) or self.kv_cache.pool.has_news

    def add(self, source: EngineRequest) -> None:
        """Queue a request; raise RequestError when it can never be served, or not now."""
        self._validate(source)
        self._num_added += 1
        self.scheduler.add(Request.admit(source, self.config.hash_scheme, arrival=self._num_added))

    def extend_prompt(self, request_id: str, token_ids: list[int], *, is_last: bool) -> None:
        """Append to an open prompt; ids that are not live are ignored.

        RequestError, with nothing changed, when the prompt is closed or cannot grow so far.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return
        if not request.is_open:
            raise RequestError("invalid_request", f"the prompt of {request_id} is complete already")
        self._limits.check_length(request.num_tokens + len(token_ids))
        self._limits.check_token_ids("prompt", token_ids)
        self.scheduler.extend_prompt(request, token_ids, is_last=is_last)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; their blocks are free at once. Unknown ids are ignored."""
        self.scheduler.abort(request_ids)

    def step(self) -> list[EngineOutput]:
        """Schedule a step, and take in the oldest one once enough are in flight.

        With `async_depth` 0 that is the same step. One that is not worth waiting for does not
        wait: outputs come as soon as they can.
        """
        self.kv_cache.pool.residency.now = self._clock.monotonic()
        scheduled = self.scheduler.schedule(
            max_tokens=self.rates.tokens_within(self.config.max_step_s)
        )
        assert scheduled.num_scheduled_tokens or not scheduled.new_requests
        self._submit(scheduled)
        outputs: list[EngineOutput] = []
        while self._in_flight and (
            len(self._in_flight) > self.config.async_depth or not scheduled.num_scheduled_tokens
        ):
            outputs += self._take_oldest()
        if self.config.check_integrity:
            check_integrity(self.scheduler)
        return outputs

    def _submit(self, step: SchedulerOutput, *, told_blocks: int | None = None) -> None:
        """Give a step to the executor; `told_blocks`: the size that it is told instead."""
        self._in_flight.append(_Submitted(step, self._clock.monotonic()))
        told = self._resync.complete(step, num_blocks=self.kv_cache.pool.num_blocks)
        if told_blocks is not None:
            told = msgspec.structs.replace(told, num_blocks=told_blocks)
        self.executor.submit(told)

    def _take_oldest(self) -> list[EngineOutput]:
        """Wait for the oldest step in flight and take in what it computed."""
        step, submitted_at = self._in_flight.popleft()
        try:
            output = self.executor.collect()
        except OutOfDeviceMemoryError as error:
            self._resync.settle()
            return self._shrink_after(error)
        except OutOfStepError as error:
            self._resync_after(error, step)
            return []
        self._resync.settle()
        self._restore_cost.observe(num_blocks=step.num_tier_moves, transfer_s=output.transfer_s)
        if step.num_scheduled_tokens:
            now = self._clock.monotonic()
            num_prefill = step.num_prefill_tokens
            num_decode = step.total_scheduled_tokens - num_prefill
            self.rates.observe(
                num_prefill_tokens=num_prefill,
                num_decode_tokens=num_decode - num_wrong_drafts(step, output),
                step_s=now - max(submitted_at, self._returned_at) - output.transfer_s,
            )
            self._returned_at = now
        self._num_steps += 1
        self.counters.padding_tokens += output.num_padding_tokens
        return self.scheduler.update_from_output(step, output)

    def take_events(self) -> list[KVEvent]:
        """Return the KV events since the last call, in order."""
        return self.kv_cache.pool.take_events()

    def snapshot_entries(self) -> list[SnapshotEntry]:
        """List every block that a look-up can find now, in every tier."""
        pool = self.kv_cache.pool
        entries = [SnapshotEntry(block_hash, group) for group, block_hash in pool.cached_keys()]
        if pool.host is not None:
            entries += [SnapshotEntry(h, group, "host") for group, h in pool.host.map]
        return entries

    def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False while requests hold blocks (see Scheduler)."""
        return self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def resize(self, num_blocks: int) -> list[EngineOutput]:
        """Make the pool `num_blocks` large, in whole slabs; return the ends of what fits no more.

        At most what the executor has, at least what one short sequence needs. Requests that hold
        a block to be given up are preempted and go on later; `max_model_len` follows.
        """
        most = self.executor.info.num_blocks
        slab = self.config.slab_blocks
        size = most if num_blocks >= most else max(num_blocks // slab * slab, self._min_blocks)
        max_model_len = self._longest_sequence(size)
        logger.info("KV cache resized num_blocks=%d max_model_len=%d", size, max_model_len)
        return self.scheduler.resize(size, max_model_len=max_model_len)

    def pause(self, mode: PauseMode) -> None:
        """Stop computing after the steps in flight, or only admit nothing new (see PauseMode)."""
        self.scheduler.pause_mode = mode

    def resume(self) -> None:
        """Go on after a pause; a no-op without one."""
        self.scheduler.pause_mode = None

    def sleep(self, level: SleepLevel) -> list[EngineOutput]:
        """Give memory back until `wake_up`; return what the steps in flight still brought.

        Running requests are preempted and go on afterwards; what comes meanwhile waits. Nothing is
        cached any more. A deeper sleep may follow. ConfigError, with nothing changed, when the
        executor cannot.
        """
        self._sleep.check(level)
        outputs: list[EngineOutput] = []
        if self._sleep.level is None:
            while self._in_flight:
                outputs += self._take_oldest()
            self._lose_cache()
            # A step that computes nothing. The first one after the sleep tells the pool's size.
            self._submit(self.scheduler.schedule(max_tokens=0), told_blocks=SHRUNK_BLOCKS)
            outputs += self._take_oldest()
        self._sleep.deepen(level)
        logger.info("asleep level=%d", level)
        return outputs

    def wake_up(self) -> None:
        """Go on with all requests after a sleep; a no-op without one."""
        if self._sleep.level is not None:
            self._sleep.wake()
            self._resync.begin_anew()
            logger.info("awake")

    def update_weights(self, model_folder: str) -> tuple[list[EngineOutput], str | None]:
        """Go on with the weights of another checkpoint of the same shape.

        Returns what the steps in flight still brought, and why the weights could not be replaced:
        then the old ones serve on. Either way nothing is cached any more, and it is awake.
        """
        outputs = self.sleep(2)
        problem = self._sleep.load_weights(model_folder)
        self._resync.begin_anew()
        logger.info("weights updated folder=%s problem=%s", model_folder, problem or "-")
        return outputs, problem

    def info(
        self,
        *,
        boot_ns: int,
        events: EventPlaces | None = None,
        announced: EventPlaces | None = None,
    ) -> EngineInfo:
        """Describe this engine to its clients; `boot_ns` tells its lives apart."""
        return EngineInfo(
            boot_ns=boot_ns,
            num_blocks=self.kv_cache.pool.num_usable,
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            known_answer=known_answer(self.config.hash_scheme),
            events=events,
            announced=announced,
            execution_digest=self.executor.info.execution_digest,
            vocab_size=self.vocab_size,
            cache_layout=self.kv_cache.layout,
        )

    def tenant_stats(self) -> dict[str, TenantStats]:
        """Return the share of each tenant, "" for requests without one; O(blocks in use)."""
        return tenant_stats(self.scheduler)

    def stats(self) -> EngineStats:
        """Return counters and gauges as of now; O(live requests)."""
        return engine_stats(
            self.scheduler,
            rates=self.rates,
            resync=self._resync,
            num_steps=self._num_steps,
            sleep_level=self._sleep.level,
        )

    def _shrink_after(self, error: OutOfDeviceMemoryError) -> list[EngineOutput]:
        """Go on with a slab less, as if the steps in flight had not been scheduled.

        Raises the error again when there is no slab to give up.
        """
        num_blocks = self.kv_cache.pool.num_blocks
        if num_blocks <= self._min_blocks:
            raise error
        logger.warning("out of device memory num_blocks=%d error=%s", num_blocks, error)
        try:
            while self._in_flight:
                step, _ = self._in_flight.popleft()
                with contextlib.suppress(OutOfDeviceMemoryError):
                    self.executor.collect()
        except OutOfStepError as lost:
            self._resync_after(lost, step)
        self.scheduler.withdraw_steps()
        self._resync.begin_anew()
        return self.resize(num_blocks - self.config.slab_blocks)

    def _resync_after(self, error: OutOfStepError, step: SchedulerOutput) -> None:
        """Go on with a runner that took in neither `step` nor any later one.

        Raises the error again when resyncs alone do not help.
        """
        if self._resync.num_attempts == MAX_RESYNCS:
            raise error
        logger.warning("runner out of step kv_lost=%s reason=%s", error.kv_lost, error)
        lost = [step, *(submitted.step for submitted in self._in_flight)]
        self._in_flight.clear()
        self.scheduler.withdraw_steps()
        self._resync.lose(lost, kv_lost=error.kv_lost)
        if error.kv_lost:
            self._lose_cache()

    def _lose_cache(self) -> None:
        """Preempt all and forget what is cached or was to move; nothing may be in flight."""
        was_reset = self.scheduler.reset_prefix_cache(preempt_running=True)
        assert was_reset, "blocks are in use although nothing runs"
        self.kv_cache.take_transfers()

    def _longest_sequence(self, num_blocks: int) -> int:
        """Return the most tokens that a sequence may have in a pool of so many blocks."""
        limits = [self.executor.info.max_model_len]
        if self.config.max_model_len:
            limits.append(self.config.max_model_len)
        fits = self.kv_cache.max_num_tokens(num_blocks)
        if fits is not None:
            limits.append(fits)
        return min(limits)

    def _smallest_size(self) -> int:
        """Return the fewest blocks, in whole slabs, that hold a prompt and an answer at all.

        ConfigError when even all that the executor has do not.
        """
        most = self.executor.info.num_blocks
        sizes: list[int] = [*range(self.config.slab_blocks, most, self.config.slab_blocks), most]
        for size in sizes:
            if self._longest_sequence(size) >= _SHORTEST_SEQUENCE:
                return size
        raise ConfigError(
            f"the KV cache of {most} blocks of {self.config.block_size} tokens holds no sequence "
            "of two tokens; give the worker more KV-cache memory"
        )

    def _validate(self, source: EngineRequest) -> None:
        if source.request_id in self.scheduler.requests:
            raise RequestError("invalid_request", f"request id {source.request_id} is in use")
        if len(self.scheduler.waiting) >= self.config.max_num_queued_reqs:
            raise RequestError(
                "overloaded",
                f"{len(self.scheduler.waiting)} requests are waiting already",
                retry_after_s=1.0,
            )
        self._limits.check_request(source)

    @property
    def _limits(self) -> ModelLimits:
        return ModelLimits(
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            takes_open_prompts=all(group.rule is not None for group in self.kv_cache.groups),
        )


class _Submitted(NamedTuple):
    """A step in flight and the monotonic instant at which the executor got it."""

    step: SchedulerOutput
    submitted_at: float
