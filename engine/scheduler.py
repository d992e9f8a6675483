"""Decides what the next step computes.

One rule for prefill, chunks, decode and resume: every running request catches up with its known
tokens, as far as the token budget goes. It is a pure state machine: no clock, no model, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.messages import EngineOutput, FinishReason
from engine.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.request import Request, RequestStatus
from engine.stats import EngineCounters


class Scheduler:
    """First come, first served over one block pool; the newest running request is preempted first.

    Call `schedule` and `update_from_output` in turn. NOTE: the oldest running request is never
    preempted, and `max_model_len` fits into the pool, so some request always finishes.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        counters: EngineCounters,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.counters = counters
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.step = 0
        self._dropped: list[str] = []

    @property
    def pool(self) -> BlockPool:
        """The pool behind the KV cache manager."""
        return self.kv_cache.pool

    @property
    def queued_prefill_tokens(self) -> int:
        """Known tokens that are not computed yet, over all requests (decode counts one each)."""
        return sum(r.num_tokens - r.num_computed_tokens for r in self.requests.values())

    def add(self, request: Request) -> None:
        """Queue a request whose id is not live and which fits the model."""
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests at whatever stage they are; unknown and finished ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request)

    def schedule(self, *, max_tokens: int | None = None) -> SchedulerOutput:
        """Plan one step; an empty one when nothing can run.

        `max_tokens` narrows the configured token budget for this step.
        """
        self.step += 1
        budget = self.config.max_num_batched_tokens
        plan = _Plan(budget=budget if max_tokens is None else min(budget, max_tokens))
        preempted = self._schedule_running(plan)
        if not preempted:
            self._schedule_waiting(plan)
        dropped, self._dropped = self._dropped, []
        return SchedulerOutput(
            step=self.step,
            new_requests=plan.new_requests,
            new_block_ids=plan.new_block_ids,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_computed_tokens=plan.num_computed_tokens,
            dropped_request_ids=dropped,
        )

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineOutput]:
        """Take in what a step computed; return what the clients get."""
        self.kv_cache.commit_step(scheduled.step)
        outputs = []
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            error = output.errors.get(request_id)
            if error is not None:
                self._finish(request)
                outputs.append(
                    EngineOutput(
                        request_id=request_id,
                        finish_reason="error",
                        error=error,
                        error_kind="internal",
                    )
                )
                continue
            sampled = output.sampled_token_ids.get(request_id)
            if sampled:
                outputs.append(self._take_tokens(request, sampled))
        return outputs

    def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False, with nothing changed, while requests hold blocks.

        With `preempt_running` they give their blocks back first and go on later, their output
        unchanged. Call it between steps only.
        """
        if preempt_running:
            while self.running:
                self._preempt(self.running[-1])
        return self.pool.reset()

    def _schedule_running(self, plan: _Plan) -> bool:
        """Let running requests go on, oldest first; True when one had to be preempted."""
        preempted = False
        cursor = 0
        while cursor < len(self.running) and plan.budget > 0:
            request = self.running[cursor]
            cursor += 1
            num_new = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
            while new_blocks is None:
                preempted = True
                victim = self.running[-1]
                assert victim is not self.running[0], "max_model_len does not fit into the pool"
                self._preempt(victim)
                if victim is request:
                    return True
                new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
            if new_blocks:
                plan.new_block_ids[request.request_id] = [b.block_id for b in new_blocks]
            self._plan_tokens(plan, request, num_new)
        return preempted

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests in order; one that waits for a pending hash lets others pass."""
        passed: list[Request] = []
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if request.awaited_hash and self.kv_cache.is_pending(request.awaited_hash):
                passed.append(self.waiting.popleft())
                continue
            hit = self.kv_cache.find_hit(request)
            request.awaited_hash = self.kv_cache.awaited(request, len(hit))
            if request.awaited_hash:
                passed.append(self.waiting.popleft())
                continue
            spare = int(self.config.watermark * self.pool.num_usable) if self.running else 0
            if not self.kv_cache.can_fit(request, hit, spare_blocks=spare):
                break
            self.waiting.popleft()
            self._admit(plan, request, len(hit) * self.pool.block_size)
            self.kv_cache.admit(request, hit)
            num_new = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
            assert new_blocks is not None, "the whole request fits but its first chunk does not"
            plan.add_new(request, [b.block_id for b in (*hit, *new_blocks)])
            self._plan_tokens(plan, request, num_new)
        self.waiting.extendleft(reversed(passed))

    def _admit(self, plan: _Plan, request: Request, num_hit_tokens: int) -> None:
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            self.counters.prefix_queries += request.num_prompt_tokens
            self.counters.prefix_hits += request.num_cached_tokens
            self.counters.prompt_tokens += request.num_prompt_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _plan_tokens(self, plan: _Plan, request: Request, num_new: int) -> None:
        assert num_new > 0, f"{request.request_id} runs but has nothing to compute"
        plan.num_computed_tokens[request.request_id] = request.num_computed_tokens
        plan.num_scheduled_tokens[request.request_id] = num_new
        plan.budget -= num_new
        request.num_computed_tokens += num_new
        self.kv_cache.queue_commits(request, self.step)

    def _preempt(self, victim: Request) -> None:
        """Take a running request's blocks; its hashes stay findable, so little is lost.

        NOTE: victims come from the tail, which the cursor of this step has not reached, so nothing
        of theirs is in the plan.
        """
        self.running.remove(victim)
        self.kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self._dropped.append(victim.request_id)
        self.waiting.appendleft(victim)

    def _take_tokens(self, request: Request, sampled: list[int]) -> EngineOutput:
        """Append sampled tokens up to the one that ends the request."""
        taken: list[int] = []
        reason: FinishReason | None = None
        stop_token_id = None
        for token_id in sampled:
            request.append(token_id)
            taken.append(token_id)
            reason, stop_token_id = self._check_stop(request, token_id)
            if reason is not None:
                self._finish(request)
                break
        self.counters.generation_tokens += len(taken)
        num_cached = None if request.cached_reported else request.num_cached_tokens
        request.cached_reported = True
        return EngineOutput(
            request_id=request.request_id,
            token_ids=taken,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached,
        )

    def _check_stop(
        self, request: Request, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        """Tell whether the token just appended ends the request: stop tokens first, then length.

        The sampler masks stop tokens until `min_tokens`; resumed outputs count as outputs.
        """
        sampling = request.source.sampling
        if request.num_output_tokens > sampling.min_tokens or sampling.min_tokens == 0:
            if not sampling.ignore_eos and token_id in request.source.eos_token_ids:
                return "stop", token_id
            if token_id in sampling.stop_token_ids:
                return "stop", token_id
        limit = sampling.max_tokens
        if limit is not None and request.num_output_tokens >= limit:
            return "length", None
        if request.num_tokens >= self.max_model_len:
            return "length", None
        return None, None

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv_cache.free(request)
            self._dropped.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]


class _Plan:
    """A step under construction."""

    __slots__ = (
        "budget",
        "new_block_ids",
        "new_requests",
        "num_computed_tokens",
        "num_scheduled_tokens",
    )

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.new_requests: list[NewRequestData] = []
        self.new_block_ids: dict[str, list[int]] = {}
        self.num_scheduled_tokens: dict[str, int] = {}
        self.num_computed_tokens: dict[str, int] = {}

    def add_new(self, request: Request, block_ids: list[int]) -> None:
        """Tell the runner everything about a request that enters the batch."""
        source = request.source
        self.new_requests.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
                sampling=source.sampling,
                eos_token_ids=source.eos_token_ids,
                choice=source.choice,
            )
        )
