"""The engine core: requests in, one step after the other, tokens and KV events out.

Synchronous and single-threaded; the process around it (worker/core) brings sockets and threads,
the simulator brings virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.executor import Executor
from engine.frontend.errors import RequestError
from engine.invariants import check_integrity
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups.group import InFlight
from engine.messages import EngineOutput, EngineRequest, EngineStats, SnapshotEntry
from engine.output import SchedulerOutput
from engine.request import Request
from engine.scheduler import Scheduler
from engine.stats import EngineCounters, StepRates
from kvindex.events import KVEvent
from kvindex.foundation.clock import Clock


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
            info.num_blocks, block_size=config.block_size, num_groups=len(info.kv_groups)
        )
        self.kv_cache = KVCacheManager(
            pool,
            groups=info.kv_groups,
            enable_caching=config.enable_prefix_caching,
            in_flight=InFlight(
                max_step_tokens=config.max_num_batched_tokens, num_steps=1 + config.async_depth
            ),
        )
        fits = self.kv_cache.max_num_tokens
        limits = [limit for limit in (info.max_model_len, config.max_model_len, fits) if limit]
        self.max_model_len = min(limits)
        self.vocab_size = info.vocab_size
        self.counters = EngineCounters()
        self.rates = StepRates()
        self.scheduler = Scheduler(
            config, self.kv_cache, max_model_len=self.max_model_len, counters=self.counters
        )
        self._in_flight: deque[_Submitted] = deque()
        self._returned_at = 0.0
        self._num_steps = 0
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute, tell the runner or bring back anything."""
        return bool(self.scheduler.requests) or bool(self._in_flight)

    def add(self, source: EngineRequest) -> None:
        """Queue a request; raise RequestError when it can never be served, or not now."""
        self._validate(source)
        self._num_added += 1
        self.scheduler.add(Request.admit(source, self.config.hash_scheme, arrival=self._num_added))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; their blocks are free at once. Unknown ids are ignored."""
        self.scheduler.abort(request_ids)

    def step(self) -> list[EngineOutput]:
        """Schedule a step, and take in the oldest one once enough are in flight.

        With `async_depth` 0 that is the same step. One that is not worth waiting for does not
        wait: outputs come as soon as they can.
        """
        scheduled = self.scheduler.schedule(
            max_tokens=self.rates.tokens_within(self.config.max_step_s)
        )
        assert scheduled.num_scheduled_tokens or not scheduled.new_requests
        self._in_flight.append(_Submitted(scheduled, self._clock.monotonic()))
        self.executor.submit(scheduled)
        outputs: list[EngineOutput] = []
        while self._in_flight and (
            len(self._in_flight) > self.config.async_depth or not scheduled.num_scheduled_tokens
        ):
            outputs += self._take_oldest()
        if self.config.check_integrity:
            check_integrity(self.scheduler)
        return outputs

    def _take_oldest(self) -> list[EngineOutput]:
        """Wait for the oldest step in flight and take in what it computed."""
        step, submitted_at = self._in_flight.popleft()
        output = self.executor.collect()
        if step.num_scheduled_tokens:
            now = self._clock.monotonic()
            num_prefill = self._num_prefill_tokens(step)
            self.rates.observe(
                num_prefill_tokens=num_prefill,
                num_decode_tokens=step.total_scheduled_tokens - num_prefill,
                step_s=now - max(submitted_at, self._returned_at),
            )
            self._returned_at = now
        self._num_steps += 1
        return self.scheduler.update_from_output(step, output)

    def take_events(self) -> list[KVEvent]:
        """Return the KV events since the last call, in order."""
        return self.kv_cache.pool.take_events()

    def snapshot_entries(self) -> list[SnapshotEntry]:
        """List every block that a look-up can find now."""
        return [
            SnapshotEntry(block_hash, group)
            for group, block_hash in self.kv_cache.pool.cached_keys()
        ]

    def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False while requests hold blocks (see Scheduler)."""
        return self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def stats(self) -> EngineStats:
        """Return counters and gauges as of now; O(live requests)."""
        scheduler, pool = self.scheduler, self.kv_cache.pool
        return EngineStats(
            step=self._num_steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached_hashes,
            prefix_queries_total=self.counters.prefix_queries,
            prefix_hits_total=self.counters.prefix_hits,
            prompt_tokens_total=self.counters.prompt_tokens,
            generation_tokens_total=self.counters.generation_tokens,
            preemptions_total=self.counters.preemptions,
            evictions_total=pool.num_evictions,
            busy_s_total=self.rates.busy_s,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_tokens_per_s=self.rates.decode_tokens_per_s,
        )

    def _num_prefill_tokens(self, scheduled: SchedulerOutput) -> int:
        """Count scheduled tokens of requests that have more than their last token to compute."""
        return sum(n for n in scheduled.num_scheduled_tokens.values() if n > 1)

    def _validate(self, source: EngineRequest) -> None:
        if source.request_id in self.scheduler.requests:
            raise RequestError("invalid_request", f"request id {source.request_id} is in use")
        if len(self.scheduler.waiting) >= self.config.max_num_queued_reqs:
            raise RequestError(
                "overloaded",
                f"{len(self.scheduler.waiting)} requests are waiting already",
                retry_after_s=1.0,
            )
        num_tokens = len(source.prompt_token_ids) + len(source.resume_token_ids)
        if not source.prompt_token_ids:
            raise RequestError("invalid_request", "the prompt has no tokens", param="prompt")
        if num_tokens >= self.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_tokens} tokens; at most {self.max_model_len - 1} leave room "
                f"for an answer (context length {self.max_model_len})",
                param="prompt",
            )
        self._validate_token_ids("prompt", source.prompt_token_ids)
        self._validate_token_ids("stop_token_ids", source.sampling.stop_token_ids)

    def _validate_token_ids(self, param: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    "invalid_request",
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}",
                    param=param,
                )


class _Submitted(NamedTuple):
    """A step in flight and the monotonic instant at which the executor got it."""

    step: SchedulerOutput
    submitted_at: float
