"""Random traffic on an engine of random shape: one state machine for every mode.

Integrity and events are checked after every rule, the tokens of each request at the end: those of
the same request run alone and uncached. The scripted executor hashes all KV contents that it reads
as a model would, so a wrong, stale, missing or too early freed block would show.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.config import QueuePolicy
from engine.core import EngineCore
from engine.invariants import check_integrity
from engine.messages import EngineRequest, PauseMode
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engine.build import Run, make_request
from tests.engine.drafting import Guesses, Oracle
from tests.engine.hybrid import GROUPS, alone_with, make_hybrid_core


class TrafficMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and resets over any cache groups, policy, pressure and async depth.

    Drafts, if any, are right, wrong or partly right.
    """

    core: EngineCore
    run: Run

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        async_depth=st.integers(0, 2),
        tightness=st.integers(0, 2),
        budget=st.sampled_from([3, 8, 40]),
        share=st.sampled_from([0.3, 1.0]),
        max_preemptions=st.integers(1, 2),
        guesses=st.sampled_from(["none", "right", "wrong", "partly"]),
        protected_share=st.sampled_from([0.0, 0.3, 0.9]),
    )
    def start(
        self,
        groups: str,
        policy: QueuePolicy,
        async_depth: int,
        tightness: int,
        budget: int,
        share: float,
        max_preemptions: int,
        guesses: Guesses,
        protected_share: float,
    ) -> None:
        self.begin(
            groups,
            guesses=guesses,
            tightness=tightness,
            budget=budget,
            policy=policy,
            max_preemptions=max_preemptions,
            max_prefill_share=share,
            async_depth=async_depth,
            protected_share=protected_share,
        )

    def begin(
        self, groups: str, *, tightness: int, guesses: Guesses = "none", **settings: Any
    ) -> None:
        """Build a core of few requests over a pool from tight to ample."""
        self.oracle = Oracle(lambda request: alone_with(self.groups, request), guesses)
        self.groups = GROUPS[groups]
        sizes = [14, 18, 90] if len(self.groups) == 1 else [26, 34, 90]
        self.core = make_hybrid_core(
            self.groups,
            num_blocks=sizes[tightness],
            max_num_seqs=4,
            watermark=0.1,
            max_bypass=2,
            proposer=self.oracle,
            **settings,
        )
        self.run = Run(self.core)
        self.requests: dict[str, EngineRequest] = {}
        self.held: set[tuple[str | None, int | None, object]] = set()
        self.num_added = 0
        self.to_come: dict[str, list[int]] = {}

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 44),
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        tenant=st.sampled_from([None, "a", "b"]),
        priority=st.integers(0, 2),
        seeded=st.booleans(),
        has_eos=st.booleans(),
        is_open=st.booleans(),
    )
    def add(
        self,
        family: int,
        length: int,
        own: int,
        max_tokens: int,
        tenant: str | None,
        priority: int,
        seeded: bool,
        has_eos: bool,
        is_open: bool,
    ) -> None:
        """Add a request of one of three families of prompts, with tokens of its own behind."""
        prompt = [(family * 50 + i) % 256 for i in range(length)]
        prompt += [200 + self.num_added % 50] * own
        if len(prompt) + max_tokens > self.core.max_model_len:
            return
        self.num_added += 1
        request = make_request(
            f"r{self.num_added}",
            prompt,
            max_tokens=max_tokens,
            salt=tenant,
            tenant=tenant,
            priority=priority,
            temperature=1.0 if seeded else 0.0,
            seed=self.num_added,
            eos=tuple(range(0, 256, 8)) if has_eos else (),
        )
        self.requests[request.request_id] = request
        self.oracle.expect(request)
        if is_open and all(group.rule for group in self.core.kv_cache.groups):
            first, self.to_come[request.request_id] = prompt[:length], prompt[length:]
            request = msgspec.structs.replace(request, prompt_token_ids=first, prompt_is_open=True)
        self.core.add(request)

    @precondition(lambda self: self.to_come)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Let an open prompt grow by a token, or end."""
        request_id = data.draw(st.sampled_from(sorted(self.to_come)))
        part, rest = self.to_come[request_id][:1], self.to_come[request_id][1:]
        self.core.extend_prompt(request_id, part, is_last=not rest)
        if rest:
            self.to_come[request_id] = rest
        else:
            del self.to_come[request_id]

    @precondition(lambda self: self.core.has_work)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        """Let the engine work."""
        for _ in range(steps):
            if self.core.has_work:
                self.run.step()

    @precondition(lambda self: self.core.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request at whatever stage it is; its id may come again."""
        request_id = data.draw(st.sampled_from(sorted(self.core.scheduler.requests)))
        self.core.abort([request_id])
        self.run.tokens.pop(request_id, None)
        self.to_come.pop(request_id, None)
        request = self.requests.pop(request_id)
        if data.draw(st.booleans()):
            self.requests[request_id] = request
            self.core.add(request)

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running: bool) -> None:
        """Forget the cache, with or without running requests."""
        in_use = bool(self.core.scheduler.running)
        done = self.core.reset_prefix_cache(preempt_running=preempt_running)
        assert done == (preempt_running or not in_use)

    @rule(mode=st.sampled_from([None, "new", "all"]))
    def pause(self, mode: PauseMode | None) -> None:
        """Drain, freeze or go on."""
        if mode is None:
            self.core.resume()
        else:
            self.core.pause(mode)

    @invariant()
    def everything_holds(self) -> None:
        """Check the engine's invariants, and that its events tell what each tier holds."""
        check_integrity(self.core.scheduler)
        pool = self.core.kv_cache.pool
        for event in self.core.take_events():
            match event:
                case BlockStored(block_hashes=hashes, medium=medium, group_idx=group):
                    keys = {(medium, group, h) for h in hashes}
                    assert not keys & self.held, "stored twice"
                    self.held |= keys
                case BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group):
                    keys = {(medium, group, h) for h in hashes}
                    assert keys <= self.held, "removed but never stored"
                    self.held -= keys
                case AllBlocksCleared():
                    self.held.clear()
        expected = {("GPU", *key) for key in pool.map}
        if pool.host is not None:
            expected |= {("CPU", *key) for key in pool.host.map}
        assert self.held == expected

    def teardown(self) -> None:
        """Run to the end: every request that was not aborted has its own tokens."""
        if not hasattr(self, "core"):
            return
        self.core.resume()
        for request_id, rest in self.to_come.items():
            self.core.extend_prompt(request_id, rest, is_last=True)
        self.run.to_end()
        for request_id, request in self.requests.items():
            assert self.run.tokens[request_id] == alone_with(self.groups, request)
        assert self.core.kv_cache.pool.num_free == self.core.kv_cache.pool.num_usable


def machine_settings(max_examples: int) -> settings:
    """Build settings that give the same examples on every machine."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
