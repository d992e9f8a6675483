"""Whatever the schedule, the tokens are those of the same request run alone and uncached.

The scripted executor's next token hashes all KV contents it reads: a wrong, stale or unwritten
block would show.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.invariants import check_integrity
from engine.messages import EngineRequest
from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request


@pytest.mark.parametrize("budget", [4, 16, 64])
@pytest.mark.parametrize("num_hit_blocks", range(6))
def test_every_hit_length_gives_the_same_tokens(budget: int, num_hit_blocks: int) -> None:
    prompt = list(range(5 * BLOCK_SIZE + 2))
    core = make_core(budget=budget)
    if num_hit_blocks:
        core.add(make_request("warm", prompt[: num_hit_blocks * BLOCK_SIZE + 1], max_tokens=1))
        Run(core).to_end()
    request = make_request("a", prompt, max_tokens=12)
    core.add(request)
    result = Run(core).to_end()
    assert result.cached["a"] == num_hit_blocks * BLOCK_SIZE
    assert result.tokens["a"] == alone(request)


@pytest.mark.fault("engine-39")
def test_sustained_pressure_loses_nothing() -> None:
    """Two hundred requests over a pool that holds three of them, seeded ones among them."""
    rng = random.Random(7)
    core = make_core(num_blocks=25, budget=24, max_num_seqs=6)
    requests = []
    for i in range(200):
        prefix = list(range(100 * (i % 3), 100 * (i % 3) + 8))
        tail = [rng.randrange(256) for _ in range(rng.randrange(1, 12))]
        requests.append(
            make_request(
                f"r{i}",
                [t % 256 for t in prefix] + tail,
                max_tokens=rng.randrange(1, 14),
                salt=rng.choice([None, "a", "b"]),
                temperature=rng.choice([0.0, 1.0]),
                seed=i,
            )
        )
    for request in requests:
        core.add(request)
    result = Run(core).to_end()
    assert core.counters.preemptions > 0
    assert result.tokens == {r.request_id: alone(r) for r in requests}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


class EngineMachine(RuleBasedStateMachine):
    """Random traffic on a small pool: integrity after every rule, the right tokens at the end."""

    policy = "fair"

    def __init__(self) -> None:
        super().__init__()
        self.core = make_core(
            num_blocks=14,
            budget=10,
            max_num_seqs=4,
            watermark=0.1,
            policy=self.policy,
            max_prefill_share=0.5,
            max_bypass=2,
            max_preemptions=2,
        )
        self.run = Run(self.core)
        self.requests: dict[str, EngineRequest] = {}
        self.stored: set[bytes] = set()
        self.num_added = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 12),
        tenant=st.sampled_from([None, "a"]),
        priority=st.integers(0, 2),
    )
    def add(
        self, family: int, length: int, max_tokens: int, tenant: str | None, priority: int
    ) -> None:
        self.num_added += 1
        request_id = f"r{self.num_added}"
        prompt = [(family * 50 + i) % 256 for i in range(length)]
        request = make_request(
            request_id,
            prompt,
            max_tokens=max_tokens,
            salt=tenant,
            tenant=tenant,
            priority=priority,
        )
        self.requests[request_id] = request
        self.core.add(request)

    @precondition(lambda self: self.core.has_work)
    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.core.has_work:
                self.run.step()

    @precondition(lambda self: self.core.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.core.scheduler.requests)))
        self.core.abort([request_id])
        del self.requests[request_id]
        self.run.tokens.pop(request_id, None)

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running: bool) -> None:
        in_use = bool(self.core.scheduler.running)
        done = self.core.reset_prefix_cache(preempt_running=preempt_running)
        assert done == (preempt_running or not in_use)

    @invariant()
    def everything_holds(self) -> None:
        check_integrity(self.core.scheduler)
        for event in self.core.take_events():
            hashes = {bytes(h) for h in getattr(event, "block_hashes", ()) if isinstance(h, bytes)}
            match type(event).__name__:
                case "BlockStored":
                    assert not hashes & self.stored, "stored twice"
                    self.stored |= hashes
                case "BlockRemoved":
                    assert hashes <= self.stored, "removed but never stored"
                    self.stored -= hashes
                case "AllBlocksCleared":
                    self.stored.clear()
        assert self.stored == {bytes(h) for h in self.core.kv_cache.pool.cached_hashes()}

    def teardown(self) -> None:
        self.run.to_end()
        for request_id, request in self.requests.items():
            assert self.run.tokens[request_id] == alone(request)
        assert self.core.kv_cache.pool.num_free == self.core.kv_cache.pool.num_usable


class PriorityMachine(EngineMachine):
    """The same under the policy that preempts for urgency."""

    policy = "priority"


_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = _SETTINGS
TestPriorityMachine = PriorityMachine.TestCase
TestPriorityMachine.settings = _SETTINGS
