"""Decides what the next step computes.

One rule for prefill, chunks, decode and resume: every running request catches up with its known
tokens, as far as the token budget goes. It is a pure state machine: no clock, no model, no I/O.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping

from engine.accounting import count_admission
from engine.block_pool import BlockPool
from engine.capacity import displaced_by
from engine.config import EngineConfig
from engine.frontend.logprobs import TokenLogprobs
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups.coordinator import PrefixHit
from engine.late_commits import queue_late_commits
from engine.messages import EngineOutput, PauseMode
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.preemption import choose_victim
from engine.request import Request, RequestStatus
from engine.request_outputs import failed_output, tokens_output, too_long_output
from engine.spec_decode.planning import confirm_drafts, count_drafts, plan_drafts
from engine.stats import EngineCounters
from engine.step_plan import InFlightStep, StepPlan
from engine.waiting_queue import make_queue

_MAX_FAILED_FITS = 8


class Scheduler:
    """Continuous batching over one block pool, admission in the order of the queue policy.

    Every `schedule` is followed by one `update_from_output`, in the same order; in between, more
    steps may be scheduled, if the executor computes them one after the other. A request then goes
    on with tokens that are *expected*: sampled in a step in flight, known when that returns. One
    that has drafts waits until it is known what they follow, and until they are verified.
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
        self.pause_mode: PauseMode | None = None
        self.num_preempted = 0
        self._dropped: list[str] = []
        self._new_prompt_ids: dict[str, list[int]] = {}
        self._in_flight: deque[InFlightStep] = deque()
        # A state cannot be taken back to where the drafts went wrong.
        self._takes_drafts = not any(group.is_state for group in kv_cache.groups)

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

    @property
    def can_go_on(self) -> bool:
        """Whether a step may have something to compute: not while paused with nothing allowed."""
        if self.pause_mode == "all":
            return False
        takes_newcomers = self.pause_mode is None
        return any(
            not request.is_stalled and (takes_newcomers or request.was_admitted)
            for request in self.requests.values()
        )

    def add(self, request: Request) -> None:
        """Queue a request whose id is not live and which fits the model."""
        assert request.request_id not in self.requests
        request.account = self.counters.account(request.source.tenant)
        request.limit_to(self.max_model_len)
        self.requests[request.request_id] = request
        self.kv_cache.prefixes.add(request)
        self.waiting.add(request)

    def extend_prompt(self, request: Request, token_ids: list[int], *, is_last: bool) -> None:
        """Append to a live request's open prompt, which the model's limit leaves room for."""
        request.extend_prompt(token_ids, is_last=is_last)
        request.is_stalled = False
        request.limit_to(self.max_model_len)
        if request.status is RequestStatus.RUNNING:
            self._new_prompt_ids.setdefault(request.request_id, []).extend(token_ids)
        if request.was_admitted:
            for counters in (self.counters, request.account):
                counters.prompt_tokens += len(token_ids)
            self.waiting.charge(request, float(len(token_ids)))

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
        budget = 0 if self.pause_mode == "all" else self.config.max_num_batched_tokens
        plan = StepPlan(
            budget=budget if max_tokens is None else min(budget, max_tokens),
            share=self.config.max_prefill_share if len(self.requests) > 1 else 1.0,
        )
        if self.pause_mode is None:
            self._yield_to_urgent()
        preempted = self._schedule_running(plan)
        if not preempted:
            self._schedule_waiting(plan)
            if not plan.requests and not self._in_flight and self._give_way(plan):
                self._schedule_waiting(plan)
        self._spend_the_rest(plan)
        dropped, self._dropped = self._dropped, []
        new_prompt_ids, self._new_prompt_ids = self._new_prompt_ids, {}
        scheduled = SchedulerOutput(
            step=self.step,
            new_requests=plan.new_requests,
            new_block_ids=plan.new_block_ids,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_computed_tokens=plan.num_computed_tokens,
            dropped_request_ids=dropped,
            new_prompt_ids=new_prompt_ids,
            transfers=self.kv_cache.take_transfers(),
            num_blocks=self.kv_cache.pool.take_new_size(),
            draft_token_ids=plan.draft_token_ids,
        )
        self._in_flight.append(InFlightStep(scheduled, plan.requests))
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
        # Before the commit: what a request wrote that failed is never found.
        outputs = self._end_failed(returned.requests, output.errors)
        self.kv_cache.commit_step(scheduled.step)
        drafts = output.draft_token_ids if self._takes_drafts else {}
        for request in returned.requests:
            if request.status is RequestStatus.FINISHED:
                continue
            request_id = request.request_id
            if output.prompt_logprobs and request_id in output.prompt_logprobs:
                start = scheduled.num_computed_tokens[request_id]
                request.add_prompt_logprobs(start, output.prompt_logprobs[request_id])
            sampled = output.sampled_token_ids.get(request_id)
            if sampled:
                logprobs = output.logprobs.get(request_id, []) if output.logprobs else []
                outputs.append(self._take_tokens(request, scheduled, sampled, logprobs))
                is_running = request.status is RequestStatus.RUNNING
                request.draft_token_ids = drafts.get(request_id, ()) if is_running else ()
        return outputs

    def _end_failed(
        self, requests: Iterable[Request], errors: Mapping[str, str]
    ) -> list[EngineOutput]:
        """End the requests of a step that the runner could not go on with."""
        if not errors:
            return []
        failed = [
            request
            for request in requests
            if request.request_id in errors and request.status is not RequestStatus.FINISHED
        ]
        for request in failed:
            self._finish(request)
        return [failed_output(request, errors[request.request_id]) for request in failed]

    def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Forget all cached blocks; False, with nothing changed, while requests hold blocks.

        With `preempt_running` they give their blocks back first and go on later, their output
        unchanged. Call it between steps only.
        """
        if preempt_running:
            self._preempt_all()
        return self.pool.reset()

    def resize(self, num_blocks: int, *, max_model_len: int) -> list[EngineOutput]:
        """Make the pool as large as told; return the ends of requests that fit no more.

        Requests that hold a block to be given up are preempted. Steps in flight may go on writing
        there: the executor learns of the new size with the next step, after it has computed them.
        """
        for request_id in displaced_by(num_blocks, self.kv_cache.tables):
            self._preempt(self.requests[request_id])
        self.kv_cache.resize(num_blocks)
        self.max_model_len = max_model_len
        for request in self.requests.values():
            request.limit_to(max_model_len)
        too_long = [r for r in self.requests.values() if r.num_tokens >= max_model_len]
        for request in too_long:
            self._finish(request)
        return [too_long_output(request, max_model_len) for request in too_long]

    def withdraw_steps(self) -> None:
        """Take back all steps in flight: the executor has computed none of them.

        What they were to write is never committed; running requests wait to be planned again.
        """
        self._preempt_all()
        for step, requests in self._in_flight:
            self.kv_cache.commit_step(step.step)
            for request in requests:
                request.num_placeholders = 0
        self._in_flight.clear()

    def _yield_to_urgent(self) -> None:
        """Preempt less urgent requests until the most urgent waiting one can be admitted.

        Before anything is planned, so that nothing has to be taken back.
        """
        if self.config.policy != "priority" or not self.running:
            return
        urgent = next(self.waiting.candidates(), None)
        if urgent is not None and (urgent.num_placeholders or urgent.is_stalled):
            return
        while urgent is not None and not self._can_admit(urgent):
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
            if request.num_expected_tokens >= request.max_num_tokens:
                cursor += 1  # The steps in flight bring it to its end for certain.
                continue
            if request.draft_token_ids and request.num_placeholders:
                cursor += 1  # What is in flight decides what follows.
                continue
            if not request.num_left:
                request.is_stalled = True
                cursor += 1
                continue
            num_new = plan.chunk_of(request)
            new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_new)
            while new_blocks is None:
                victim = choose_victim(self.running, cursor, self.config)
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
                if new_blocks:
                    plan.add_blocks(request, new_blocks)
                self._plan_tokens(plan, request, num_new)
                if request.draft_token_ids:
                    num_behind = len(self.running) - cursor
                    plan_drafts(plan, request, self.kv_cache, num_behind=num_behind)
        return preempted

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
            if self.pause_mode == "new" and not request.was_admitted:
                continue
            if request.is_stalled:
                continue
            if request.num_placeholders:
                continue  # Preempted with samples in flight: its tokens are not all known yet.
            if request.awaited_hash and self.kv_cache.is_pending(request.awaited_hash):
                continue
            hit = self.kv_cache.find_hit(request)
            if hit.num_tokens + request.is_open == request.num_tokens:
                request.is_stalled = True
                continue
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

    def _give_way(self, plan: StepPlan) -> bool:
        """Preempt requests whose open prompts stall, when all others wait; False without any.

        They hold blocks, or are to write one that another waits for, and nobody knows how long.
        What they have computed stays cached.
        """
        stalled = [request for request in self.running if request.is_stalled]
        if plan.budget <= 0 or all(request.is_stalled for request in self.waiting):
            return False
        for request in stalled:
            self._preempt(request)
        return bool(stalled)

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
        return max(request.num_tokens, request.max_num_tokens)

    def _admit(self, plan: StepPlan, request: Request, hit: PrefixHit, num_reserved: int) -> None:
        request.num_computed_tokens = hit.num_tokens
        if not request.was_admitted:
            self.waiting.charge(request, count_admission(request, self.counters))
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
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

    def _spend_the_rest(self, plan: StepPlan) -> None:
        """Give what is left of the budget to prompts that were held to their share."""
        for request in plan.held_back:
            if request.request_id not in plan.num_scheduled_tokens:
                continue  # It was preempted after all.
            num_more = min(plan.budget, request.num_left)
            if num_more <= 0:
                return
            new_blocks = self.kv_cache.extend(request, request.num_computed_tokens + num_more)
            if new_blocks is None:
                continue
            if new_blocks:
                plan.add_blocks(request, new_blocks)
            self._plan_tokens(plan, request, num_more)

    def _plan_tokens(self, plan: StepPlan, request: Request, num_new: int) -> None:
        assert num_new > 0, f"{request.request_id} runs but has nothing to compute"
        plan.add_tokens(request, num_new)
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_new
        if end == request.num_expected_tokens:
            request.num_placeholders += 1
        size = self.pool.block_size
        if end // size > start // size or self.kv_cache.tracks_progress:
            self.kv_cache.queue_commits(request, self.step, num_computed_tokens=end)

    def _preempt(self, victim: Request) -> None:
        """Take a running request's blocks; its hashes stay findable, so little is lost.

        NOTE: nothing of a victim is in the plan of this step.
        """
        self.running.remove(victim)
        self.kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        self.num_preempted += 1
        victim.num_computed_tokens = 0
        victim.draft_token_ids = ()
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        victim.account.preemptions += 1
        self._tell_dropped(victim)
        self.waiting.add(victim)

    def _preempt_all(self) -> None:
        while self.running:
            self._preempt(self.running[-1])

    def _tell_dropped(self, request: Request) -> None:
        self._dropped.append(request.request_id)
        self._new_prompt_ids.pop(request.request_id, None)

    def _take_tokens(
        self,
        request: Request,
        step: SchedulerOutput,
        sampled: list[int],
        logprobs: list[TokenLogprobs],
    ) -> EngineOutput:
        """Append sampled tokens up to the one that ends the request."""
        num_taken, reason, stop_token_id = 0, None, None
        for token_id in sampled:
            reason, stop_token_id = request.append(token_id)
            num_taken += 1
            if reason is not None:
                break
        request.num_placeholders -= 1
        if step.draft_token_ids and request.request_id in step.draft_token_ids:
            count_drafts(request, step, self.counters.speculation, num_right=len(sampled) - 1)
            confirm_drafts(request, step, self.kv_cache, num_accepted=num_taken - 1)
        self.counters.generation_tokens += num_taken
        request.account.generation_tokens += num_taken
        self.waiting.charge(request, float(num_taken))
        if reason is not None:
            self._finish(request)
        elif self._in_flight and request.status is RequestStatus.RUNNING:
            queue_late_commits(request, self._in_flight, self.kv_cache)
        return tokens_output(
            request,
            sampled[:num_taken],
            logprobs[:num_taken] if logprobs else logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
        )

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv_cache.free(request)
            self._tell_dropped(request)
        else:
            self.num_preempted -= request.status is RequestStatus.PREEMPTED
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.kv_cache.prefixes.remove(request)
        del self.requests[request.request_id]
