"""Decides what the next step computes.

One rule for prefill, chunks, decode and resume: every running request catches up with its known
tokens, as far as the token budget goes. It is a pure state machine: no clock, no model, no I/O.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.frontend.charge import charge
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups.coordinator import PrefixHit
from engine.messages import EngineOutput, FinishReason
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request, RequestStatus
from engine.stats import EngineCounters
from engine.step_plan import StepPlan
from engine.waiting_queue import make_queue

_MAX_FAILED_FITS = 8


class Scheduler:
    """Continuous batching over one block pool, admission in the order of the queue policy.

    Every `schedule` is followed by one `update_from_output`, in the same order; in between, more
    steps may be scheduled, if the executor computes them one after the other. A request then goes
    on with tokens that are *expected*: sampled in a step in flight, known when that returns.
    NOTE: running requests are kept in order of importance; the first of them is never preempted,
    one that was preempted often enough holds all its blocks, and `max_model_len` fits into the
    pool; so some request always finishes.
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
        self.waiting = make_queue(config.policy, aging_arrivals=config.aging_arrivals)
        self.step = 0
        self._dropped: list[str] = []
        self._in_flight: deque[_InFlightStep] = deque()

    @property
    def pool(self) -> BlockPool:
        """The pool behind the KV cache manager."""
        return self.kv_cache.pool

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that are not scheduled yet, over all requests (decode counts one each)."""
        return sum(r.num_expected_tokens - r.num_computed_tokens for r in self.requests.values())

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and have not returned."""
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request whose id is not live and which fits the model."""
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.add(request)

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
        plan = StepPlan(
            budget=budget if max_tokens is None else min(budget, max_tokens),
            share=self.config.max_prefill_share if len(self.requests) > 1 else 1.0,
        )
        self._yield_to_urgent()
        preempted = self._schedule_running(plan)
        if not preempted:
            self._schedule_waiting(plan)
        self._spend_the_rest(plan)
        dropped, self._dropped = self._dropped, []
        scheduled = SchedulerOutput(
            step=self.step,
            new_requests=plan.new_requests,
            new_block_ids=plan.new_block_ids,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_computed_tokens=plan.num_computed_tokens,
            dropped_request_ids=dropped,
            block_copies=self.kv_cache.take_copies(),
        )
        self._in_flight.append(_InFlightStep(scheduled, plan.requests))
        return scheduled

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineOutput]:
        """Take in what the oldest step in flight computed; return what the clients get.

        What it computed of a request that has ended meanwhile is dropped. What it sampled of one
        that was preempted meanwhile counts: it was computed before anything was taken away.
        """
        returned = self._in_flight.popleft()
        assert returned.scheduled is scheduled, "steps return in the order in which they were made"
        self.kv_cache.commit_step(scheduled.step)
        outputs = []
        for request in returned.requests:
            if request.status is RequestStatus.FINISHED:
                continue
            request_id = request.request_id
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

    def _yield_to_urgent(self) -> None:
        """Preempt less urgent requests until the most urgent waiting one can be admitted.

        Before anything is planned, so that nothing has to be taken back.
        """
        if self.config.policy != "priority" or not self.running:
            return
        urgent = next(self.waiting.candidates(), None)
        while urgent is not None and not urgent.num_placeholders and not self._can_admit(urgent):
            victim = self.running[-1]
            is_protected = victim.num_preemptions >= self.config.max_preemptions
            if is_protected or victim.source.priority <= urgent.source.priority:
                return
            self._preempt(victim)
            if not self.running:
                return

    def _can_admit(self, request: Request) -> bool:
        if len(self.running) >= self.config.max_num_seqs:
            return False
        hit = self.kv_cache.find_hit(request)
        return self.kv_cache.can_fit(
            hit, num_tokens=self._num_reserved(request), spare_blocks=self._spare_blocks
        )

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Let running requests go on, most important first; True when one was preempted."""
        preempted = False
        cursor = 0
        while cursor < len(self.running) and plan.budget > 0:
            request = self.running[cursor]
            if request.num_placeholders and self._ends_in_flight(request):
                cursor += 1
                continue
            num_new = plan.chunk_of(request)
            new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
            while new_blocks is None:
                victim = self._choose_victim(cursor)
                if victim is None:
                    break
                preempted = True
                self._preempt(victim)
                if victim is request:
                    break
                new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
            if request.status is RequestStatus.PREEMPTED:
                continue
            cursor += 1
            if new_blocks is not None:
                plan.add_blocks(request, new_blocks)
                self._plan_tokens(plan, request, num_new)
        return preempted

    def _choose_victim(self, cursor: int) -> Request | None:
        """Return the running request that loses least work, of those not planned in this step.

        Never the most important one, nor one that holds all its blocks; under `priority` only of
        the least urgent level. None when there is none: then those that have blocks go on.
        """
        candidates = [
            request
            for request in self.running[max(cursor, 1) :]
            if request.num_preemptions < self.config.max_preemptions
        ]
        if self.config.policy == "priority" and candidates:
            lowest = max(request.source.priority for request in candidates)
            candidates = [r for r in candidates if r.source.priority == lowest]
        return min(candidates, key=lambda r: (r.num_computed_tokens, -r.arrival), default=None)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in the order of the policy.

        One that waits for a pending hash lets others pass. One that does not fit lets a bounded
        number of others pass, so that it neither idles the machine nor starves.
        """
        admitted: list[Request] = []
        blocked: Request | None = None
        num_failed = 0
        for request in self.waiting.candidates():
            if plan.budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            if blocked is not None and (
                blocked.num_bypassed >= self.config.max_bypass or num_failed >= _MAX_FAILED_FITS
            ):
                break
            if request.num_placeholders:
                continue  # Preempted with samples in flight: its tokens are not all known yet.
            if request.awaited_hash and self.kv_cache.is_pending(request.awaited_hash):
                continue
            hit = self.kv_cache.find_hit(request)
            request.awaited_hash = self.kv_cache.awaited(request, hit)
            if request.awaited_hash:
                continue
            num_reserved = self._num_reserved(request)
            if not self.kv_cache.can_fit(
                hit, num_tokens=num_reserved, spare_blocks=self._spare_blocks
            ):
                num_failed += 1
                blocked = blocked or request
                continue
            if blocked is not None:
                blocked.num_bypassed += 1
            admitted.append(request)
            self._admit(plan, request, hit, num_reserved)
        for request in admitted:
            self.waiting.remove(request)

    @property
    def _spare_blocks(self) -> int:
        """Blocks to keep free at an admission, so that running requests can grow."""
        return int(self.config.watermark * self.pool.num_usable) if self.running else 0

    def _num_reserved(self, request: Request) -> int:
        """Return how many tokens must fit before a request is admitted.

        All known ones; all that it may ever have, once it was preempted too often.
        """
        if request.num_preemptions < self.config.max_preemptions:
            return request.num_tokens
        limit = request.source.sampling.max_tokens
        longest = self.max_model_len if limit is None else request.num_prompt_tokens + limit
        return max(request.num_tokens, min(self.max_model_len, longest))

    def _admit(self, plan: StepPlan, request: Request, hit: PrefixHit, num_reserved: int) -> None:
        request.num_computed_tokens = hit.num_tokens
        if request.num_cached_tokens is None:
            self._count_admission(request)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=self.waiting.importance)
        is_protected = num_reserved > request.num_tokens
        reserve_tokens = num_reserved if is_protected else None
        self.kv_cache.admit(request, hit, reserve_tokens=reserve_tokens)
        num_new = plan.chunk_of(request)
        new_ids = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
        assert new_ids is not None, "the whole request fits but its first chunk does not"
        plan.add_new(request, self.kv_cache.block_ids(request))
        self._plan_tokens(plan, request, num_new)

    def _count_admission(self, request: Request) -> None:
        """Count prompt and hit of a first admission, and charge its tenant for them."""
        num_prompt = request.num_prompt_tokens
        num_cached = request.num_cached_tokens = min(request.num_computed_tokens, num_prompt)
        self.counters.prefix_queries += num_prompt
        self.counters.prefix_hits += num_cached
        self.counters.prompt_tokens += num_prompt
        cost = charge(
            num_uncached_tokens=num_prompt - num_cached,
            num_cached_tokens=num_cached,
            num_output_tokens=0,
        )
        self.waiting.charge(request, cost)

    def _spend_the_rest(self, plan: StepPlan) -> None:
        """Give what is left of the budget to prompts that were held to their share."""
        for request in plan.held_back:
            if request.request_id not in plan.num_scheduled_tokens:
                continue  # It was preempted after all.
            num_left = request.num_expected_tokens - request.num_computed_tokens
            num_more = min(plan.budget, num_left)
            if num_more <= 0:
                return
            new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_more)
            if new_blocks is None:
                continue
            plan.add_blocks(request, new_blocks)
            self._plan_tokens(plan, request, num_more)

    def _plan_tokens(self, plan: StepPlan, request: Request, num_new: int) -> None:
        assert num_new > 0, f"{request.request_id} runs but has nothing to compute"
        plan.add_tokens(request, num_new)
        request.num_computed_tokens += num_new
        if request.num_computed_tokens == request.num_expected_tokens:
            request.num_placeholders += 1
        self.kv_cache.queue_commits(
            request, self.step, num_computed_tokens=request.num_computed_tokens
        )

    def _preempt(self, victim: Request) -> None:
        """Take a running request's blocks; its hashes stay findable, so little is lost.

        NOTE: nothing of a victim is in the plan of this step.
        """
        self.running.remove(victim)
        self.kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self._dropped.append(victim.request_id)
        self.waiting.add(victim)

    def _take_tokens(self, request: Request, sampled: list[int]) -> EngineOutput:
        """Append sampled tokens up to the one that ends the request."""
        taken: list[int] = []
        reason: FinishReason | None = None
        stop_token_id = None
        for token_id in sampled:
            request.append(token_id)
            request.num_placeholders -= 1
            taken.append(token_id)
            reason, stop_token_id = self._check_stop(request, token_id)
            if reason is not None:
                self._finish(request)
                break
        if self._in_flight and request.status is RequestStatus.RUNNING:
            self._queue_late_commits(request)
        self.counters.generation_tokens += len(taken)
        self.waiting.charge(request, float(len(taken)))
        num_cached = None if request.cached_reported else request.num_cached_tokens
        request.cached_reported = True
        return EngineOutput(
            request_id=request.request_id,
            token_ids=taken,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached,
        )

    def _queue_late_commits(self, request: Request) -> None:
        """Note the block that a step in flight completes with a token that is known only now."""
        if request.num_tokens % self.pool.block_size:
            return
        for step, _ in self._in_flight:
            num_scheduled = step.num_scheduled_tokens.get(request.request_id)
            if num_scheduled is not None:
                end = step.num_computed_tokens[request.request_id] + num_scheduled
                self.kv_cache.queue_commits(request, step.step, num_computed_tokens=end)
                return

    def _ends_in_flight(self, request: Request) -> bool:
        """Tell whether the steps in flight bring a request to its limit of tokens for certain."""
        num_expected = request.num_expected_tokens
        limit = request.source.sampling.max_tokens
        if limit is not None and num_expected - request.num_prompt_tokens >= limit:
            return True
        return num_expected >= self.max_model_len

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


class _InFlightStep(NamedTuple):
    """A step that was scheduled, and the requests that it computes, as they were then.

    NOTE: requests, not ids: an id may live again before a step of its first life returns.
    """

    scheduled: SchedulerOutput
    requests: list[Request]
