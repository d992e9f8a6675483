"""The index in Redis answers like the one in memory, after any sequence of operations."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvindex.config import RedisConfig
from kvindex.foundation.clock import VirtualClock
from kvindex.index import IndexOp, LoadReport, Reservation, SequencedOps, Target, Tier
from kvindex.match_hints import MatchHints
from kvindex.memory_index import MemoryIndex
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_roster import Hints
from tests.contracts.index_subject import BOOT_NS, CLEARED, chain
from tests.redis_server import RedisServer

CHAINS = [chain(12, "x"), chain(12, "y")]
# A crowded machine may keep a call waiting; what is compared is the answers.
PATIENT = RedisConfig(call_timeout_s=30.0)
BLOCKS = [block_hash for hashes in CHAINS for block_hash in hashes]

targets = st.sampled_from([Target("a"), Target("a", 1), Target("b")])
epochs = st.sampled_from(["current", "older", "newer"])
some_blocks = st.lists(st.sampled_from(BLOCKS), max_size=8).map(tuple)
prefixes = st.tuples(st.sampled_from(CHAINS), st.integers(0, 12)).map(lambda t: tuple(t[0][: t[1]]))
tiers: st.SearchStrategy[Tier] = st.sampled_from(["gpu", "host"])
changes = st.builds(
    IndexOp,
    kind=st.sampled_from(["stored", "removed"]),
    hashes=some_blocks | prefixes,
    group=st.integers(0, 1),
    tier=tiers,
)
additions = st.builds(
    IndexOp, kind=st.just("stored"), hashes=some_blocks | prefixes, group=st.just(0), tier=tiers
)
request_ids = st.sampled_from(["r1", "r2", "r3"])
gateways = st.sampled_from(["g1", "g2"])
attempts = st.integers(0, 1)


class Equivalence(RuleBasedStateMachine):
    """Do everything to both and compare every answer."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self.memory = MemoryIndex(VirtualClock(1000.0))
        # Inventories here have gaps, as no engine's have: what a match finds then depends on where
        # it looks, so both have to look at the same places.
        unhinted: MatchHints[Hints] = MatchHints(max_chains=0)
        pool = uuid.uuid4().hex[:16]
        self.redis = RedisIndex(connect(self.url, PATIENT), pool, hints=unhinted)
        # Another client, which looks now and then and has to be told what it missed.
        self.late = RedisIndex(connect(self.url, PATIENT), pool, hints=unhinted)
        self.epochs: dict[Target, int] = {}

    def teardown(self) -> None:
        self._await(self.redis.close())
        self._await(self.late.close())
        self._runner.close()

    def _await(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(call)

    def _epoch(self, target: Target, which: str) -> int:
        return self.epochs.get(target, 5) + {"current": 0, "older": -1, "newer": 1}[which]

    @rule(target_=targets, boot_ns=st.sampled_from([BOOT_NS, BOOT_NS + 2, 9, 99]))
    def register(self, target_: Target, boot_ns: int) -> None:
        expected = self.memory.register(target_, boot_ns=boot_ns, lease_s=600)
        assert self._await(self.redis.register(target_, boot_ns=boot_ns, lease_s=600)) == expected
        self.epochs[target_] = expected

    @rule(target_=targets, which=epochs, num_running=st.integers(0, 3))
    def renew(self, target_: Target, which: str, num_running: int) -> None:
        epoch, report = self._epoch(target_, which), LoadReport(num_running=num_running)
        expected = self.memory.renew(target_, epoch, lease_s=600, report=report)
        call = self.redis.renew(target_, epoch, lease_s=600, report=report)
        assert self._await(call) == expected

    @rule(target_=targets, which=epochs)
    def deregister(self, target_: Target, which: str) -> None:
        epoch = self._epoch(target_, which)
        self.memory.deregister(target_, epoch)
        self._await(self.redis.deregister(target_, epoch))

    @rule(
        target_=targets,
        which=st.sampled_from(["current", "current", "current", "older"]),
        first=st.integers(0, 4),
        steps=st.lists(st.sampled_from([1, 1, 1, 2]), max_size=3),
        ops=st.lists(st.lists(changes | st.just(CLEARED), max_size=3), min_size=4, max_size=4),
    )
    def apply(
        self, target_: Target, which: str, first: int, steps: list[int], ops: list[list[IndexOp]]
    ) -> None:
        seqs = [first]
        for step in steps:
            seqs.append(seqs[-1] + step)
        batches = [SequencedOps(seq, tuple(ops[i])) for i, seq in enumerate(seqs)]
        epoch = self._epoch(target_, which)
        expected = self.memory.apply(target_, epoch, batches)
        assert self._await(self.redis.apply(target_, epoch, batches)) == expected

    @rule(
        target_=targets, which=epochs, seq=st.integers(-1, 3), ops=st.lists(additions, max_size=3)
    )
    def load_snapshot(self, target_: Target, which: str, seq: int, ops: list[IndexOp]) -> None:
        epoch = self._epoch(target_, which)
        expected = self.memory.load_snapshot(target_, epoch, seq=seq, ops=ops)
        assert self._await(self.redis.load_snapshot(target_, epoch, seq=seq, ops=ops)) == expected

    @rule(gateway=gateways)
    def touch_gateway(self, gateway: str) -> None:
        self.memory.touch_gateway(gateway, lease_s=600)
        self._await(self.redis.touch_gateway(gateway, lease_s=600))

    @rule(
        reservation=st.builds(
            Reservation,
            request_id=request_ids,
            attempt=attempts,
            target=targets,
            gateway=gateways,
            prefill_tokens=st.integers(0, 500),
            num_blocks=st.integers(0, 50),
            pending=some_blocks | prefixes,
            pending_ttl_s=st.just(600.0),
        )
    )
    def reserve(self, reservation: Reservation) -> None:
        self.memory.reserve(reservation)
        self._await(self.redis.reserve(reservation))

    @rule(target_=targets, request_id=request_ids, attempt=attempts)
    def release_prefill(self, target_: Target, request_id: str, attempt: int) -> None:
        self.memory.release_prefill(target_, request_id, attempt)
        self._await(self.redis.release_prefill(target_, request_id, attempt))

    @rule(target_=targets, request_id=request_ids, attempt=attempts, written=st.booleans())
    def release(self, target_: Target, request_id: str, attempt: int, written: bool) -> None:
        self.memory.release(target_, request_id, attempt, written=written)
        self._await(self.redis.release(target_, request_id, attempt, written=written))

    @rule(hashes=st.sampled_from(CHAINS))
    def look_with_the_late_client(self, hashes: list[bytes]) -> None:
        assert self._await(self.late.match(hashes)) == self.memory.match(hashes)

    @invariant()
    def matches_are_equal(self) -> None:
        for hashes in CHAINS:
            assert self._await(self.redis.match(hashes)) == self.memory.match(hashes)

    @invariant()
    def states_are_equal(self) -> None:
        found = self._await(self.redis.states())
        expected = self.memory.states()
        assert [msgspec.structs.replace(state, lease_left_s=0.0) for state in found] == [
            msgspec.structs.replace(state, lease_left_s=0.0) for state in expected
        ]


def compare(server: RedisServer, *, num_examples: int, num_steps: int) -> None:
    class OnServer(Equivalence):
        url = server.url

    run_state_machine_as_test(
        OnServer,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_both_indexes_agree(shared_redis: RedisServer) -> None:
    compare(shared_redis, num_examples=10, num_steps=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_indexes_agree_at_length(shared_redis: RedisServer) -> None:
    compare(shared_redis, num_examples=150, num_steps=50)
