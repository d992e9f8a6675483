"""With any set of cache groups, tokens are those of the same request run alone and uncached.

The scripted executor reads each group as a model would: a window only its window, a state only
its state. A wrong, stale, missing or too early freed block would show.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.core import EngineCore
from engine.invariants import check_integrity
from engine.kv_groups.group import InFlight, resolve_groups
from engine.kv_groups.spec import KVGroupSpec
from engine.messages import EngineRequest
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engine.build import BLOCK_SIZE, Run, make_request, run
from tests.engine.hybrid import GROUPS, alone_with, make_hybrid_core

each_group_set = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


@each_group_set
@pytest.mark.parametrize("budget", [5, 64])
def test_every_hit_length_gives_the_same_tokens(
    groups: tuple[KVGroupSpec, ...], budget: int
) -> None:
    prompt = list(range(37))
    request = make_request("a", prompt, max_tokens=12)
    expected = alone_with(groups, request)
    for num_shared in range(len(prompt) + 1):
        core = make_hybrid_core(groups, budget=budget)
        warm = make_request("warm", [*prompt[:num_shared], 99], max_tokens=3)
        run(core, warm)
        result = run(core, request)
        assert result.cached["a"] <= num_shared
        assert result.tokens["a"] == expected


@each_group_set
def test_siblings_of_a_burst_compute_their_prefix_once(groups: tuple[KVGroupSpec, ...]) -> None:
    core = make_hybrid_core(groups, num_blocks=512, budget=16)
    shared = list(range(8 * BLOCK_SIZE))
    requests = [make_request(f"r{i}", [*shared, *[100 + i] * 6]) for i in range(16)]
    result = run(core, *requests)
    assert result.tokens == {r.request_id: alone_with(groups, r) for r in requests}
    num_drafted = BLOCK_SIZE if any(getattr(spec, "drafter", False) for spec in groups) else 0
    hit = len(shared) - num_drafted
    assert [result.cached[f"r{i}"] for i in range(16)] == [0] + [hit] * 15


@each_group_set
def test_pressure_with_preemption_loses_nothing(groups: tuple[KVGroupSpec, ...]) -> None:
    """The pool holds the longest request and a bit. States never take more than was reserved."""
    rng = random.Random(11)
    resolved = resolve_groups(groups, hash_block_size=BLOCK_SIZE)
    ahead = InFlight(max_step_tokens=12)
    num_blocks = 5 + sum(group.max_held_blocks(46, ahead) for group in resolved)
    core = make_hybrid_core(
        groups, num_blocks=num_blocks, budget=12, max_num_seqs=5, max_preemptions=2
    )
    requests = []
    for i in range(30):
        shared = [(40 * (i % 3) + j) % 256 for j in range(rng.randrange(1, 16))]
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 8))]
        requests.append(
            make_request(
                f"r{i}",
                shared + own,
                max_tokens=rng.randrange(8, 24),
                temperature=rng.choice([0.0, 1.0]),
                seed=i,
            )
        )
    result = run(core, *requests)
    assert core.counters.preemptions > 0 or all(group.is_state for group in resolved)
    assert result.tokens == {r.request_id: alone_with(groups, r) for r in requests}
    assert core.kv_cache.pool.num_free == core.kv_cache.pool.num_usable


class HybridMachine(RuleBasedStateMachine):
    """Random traffic over a random set of groups: integrity, events and tokens."""

    core: EngineCore
    run: Run

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        num_blocks=st.sampled_from([26, 34, 90]),
        budget=st.sampled_from([3, 8, 40]),
        share=st.sampled_from([0.3, 1.0]),
    )
    def start(self, groups: str, num_blocks: int, budget: int, share: float) -> None:
        self.groups = GROUPS[groups]
        self.core = make_hybrid_core(
            self.groups,
            num_blocks=num_blocks,
            budget=budget,
            max_num_seqs=4,
            max_preemptions=1,
            max_prefill_share=share,
        )
        self.run = Run(self.core)
        self.requests: dict[str, EngineRequest] = {}
        self.stored: set[tuple[int | None, object]] = set()
        self.num_added = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 44),
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, "a"]),
    )
    def add(self, family: int, length: int, own: int, max_tokens: int, salt: str | None) -> None:
        self.num_added += 1
        prompt = [(family * 50 + i) % 256 for i in range(length)] + [
            200 + self.num_added % 50
        ] * own
        request = make_request(f"r{self.num_added}", prompt, max_tokens=max_tokens, salt=salt)
        if len(prompt) + max_tokens > self.core.max_model_len:
            return
        self.requests[request.request_id] = request
        self.core.add(request)

    @precondition(lambda self: self.core.has_work)
    @rule(steps=st.integers(1, 5))
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
        self.core.reset_prefix_cache(preempt_running=preempt_running)

    @invariant()
    def everything_holds(self) -> None:
        check_integrity(self.core.scheduler)
        for event in self.core.take_events():
            match event:
                case BlockStored(block_hashes=hashes, group_idx=group):
                    keys = {(group, h) for h in hashes}
                    assert not keys & self.stored, "stored twice"
                    self.stored |= keys
                case BlockRemoved(block_hashes=hashes, group_idx=group):
                    keys = {(group, h) for h in hashes}
                    assert keys <= self.stored, "removed but never stored"
                    self.stored -= keys
                case AllBlocksCleared():
                    self.stored.clear()
        assert self.stored == set(self.core.kv_cache.pool.cached_keys())

    def teardown(self) -> None:
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


class HybridMachineAtLength(HybridMachine):
    """The same machine with more examples."""


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = machine_settings(60)
TestHybridMachineAtLength = pytest.mark.slow(HybridMachineAtLength.TestCase)
TestHybridMachineAtLength.settings = machine_settings(1000)
