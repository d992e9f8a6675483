"""Many decode steps at once: the same states, times and events, without planning each step.

While every running request decodes and nobody waits, a step changes nothing but counts, except
where a block begins or is full. Those places are visited through the real KV cache; the rest is
added up. A property test holds it equal to the scheduler's own steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.core import EngineCore
from engine.request import Request
from kvindex.events import KVEvent
from kvindex.foundation.clock import VirtualClock
from sim.latency import LatencyModel
from sim.sized_request import TokenCount


class Change(NamedTuple):
    """What a step changed in the pool, and when it ended."""

    end_s: float
    events: list[KVEvent]


@dataclass(slots=True)
class _Decoding:
    """A running request, and where it stood when the fast part began."""

    request: Request
    tokens: TokenCount
    num_computed: int
    num_tokens: int

    def settle(self, num_steps: int) -> None:
        """Bring the request to where so many steps have brought it."""
        self.request.num_computed_tokens = self.num_computed + num_steps
        self.tokens.count_known = self.num_tokens + num_steps
        self.request.chain.extend(self.tokens)


def fast_forward(
    core: EngineCore, clock: VirtualClock, latency: LatencyModel, *, until: float
) -> list[Change]:
    """Decode while whole steps end by `until` and none of them would end or preempt a request.

    The caller has taken all events before; what is left to do is an ordinary step's.
    """
    running = _decoding(core)
    num_steps = _num_steps_before_an_end(core)
    if not running or num_steps < 1:
        return []
    borders = _borders(running, core.config.block_size)
    context = sum(entry.num_computed for entry in running)
    changes: list[Change] = []
    done = 0
    while done < num_steps:
        cost_s = latency.step_s(
            prefill_tokens=0, prefill_pairs=0, decodes=len(running), context=context
        )
        visited = borders[done % len(borders)]
        now = clock.monotonic()
        if now + cost_s > until or not _has_room(core, len(visited)):
            break
        core.scheduler.step += 1
        clock.advance(cost_s)
        core.rates.observe(
            num_prefill_tokens=0,
            num_decode_tokens=len(running),
            step_s=clock.monotonic() - now,
        )
        if visited:
            _visit(core, visited, done)
            events = core.take_events()
            if events:
                changes.append(Change(clock.monotonic(), events))
        context += len(running)
        done += 1
    _count(core, running, done)
    return changes


def _decoding(core: EngineCore) -> list[_Decoding]:
    """Return the running requests in order; none unless all of them decode and nobody waits."""
    scheduler = core.scheduler
    budget = core.rates.tokens_within(core.config.max_step_s)
    most = core.config.max_num_batched_tokens
    if scheduler.waiting or len(scheduler.running) > min(most, budget or most):
        return []
    running = []
    for request in scheduler.running:
        tokens = request.token_ids
        assert isinstance(tokens, TokenCount), "requests of a replay have sizes only"
        # The last token of a prompt alone is one to compute too, but its output is the first.
        if not request.cached_reported or len(tokens) != request.num_computed_tokens + 1:
            return []
        running.append(_Decoding(request, tokens, request.num_computed_tokens, len(tokens)))
    return running


def _num_steps_before_an_end(core: EngineCore) -> int:
    scheduler = core.scheduler
    left = [scheduler.max_model_len - request.num_tokens for request in scheduler.running]
    left += [
        request.source.sampling.max_tokens - request.num_output_tokens
        for request in scheduler.running
        if request.source.sampling.max_tokens is not None
    ]
    return min(left, default=0) - 1


def _borders(running: list[_Decoding], block_size: int) -> list[list[_Decoding]]:
    """Return, by step modulo the block size, who begins or completes a block there, in order."""
    borders: list[list[_Decoding]] = [[] for _ in range(block_size)]
    for entry in running:
        begins = -entry.num_computed % block_size
        for step in {begins, (begins - 1) % block_size}:
            borders[step].append(entry)
    return borders


def _has_room(core: EngineCore, num_blocks: int) -> bool:
    return num_blocks <= core.kv_cache.pool.num_free - core.kv_cache.num_reserved


def _visit(core: EngineCore, visited: list[_Decoding], done: int) -> None:
    """Do what a step does to the blocks of these requests; `done` steps came before it."""
    kv_cache, step = core.kv_cache, core.scheduler.step
    for entry in visited:
        entry.settle(done)
        num_computed = entry.num_computed + done + 1
        new_ids = kv_cache.extend(entry.request, num_computed)
        assert new_ids is not None, "there was room for every block"
        kv_cache.queue_commits(entry.request, step, num_computed_tokens=num_computed)
    kv_cache.commit_step(step)


def _count(core: EngineCore, running: list[_Decoding], num_steps: int) -> None:
    """Bring every request, and what is counted of it, to where the steps have brought it."""
    if not num_steps:
        return
    core.counters.generation_tokens += num_steps * len(running)
    for entry in running:
        entry.settle(num_steps)
        entry.request.account.generation_tokens += num_steps
        core.scheduler.waiting.charge(entry.request, float(num_steps))
