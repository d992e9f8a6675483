"""Whatever happens to two replicas' events, the index says what was true at the batch it names.

At every moment the inventory of a target is exactly the replica's pool as of the applied sequence
number, so no block is credited that was evicted before; when all is quiet, index and pools are
equal.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvindex.foundation.errors import DependencyError
from kvindex.index import IndexOp, SequencedOps, Target
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, chain, removed, stored
from tests.kvindex.following import Follow, following
from tests.kvindex.stream_engine import StreamEngine
from tests.redis_server import RedisServer

CHAIN = chain(40)
BOOT_STEP_NS = 1_000_000
"""More than an ingester can register within a test: an epoch tells its boot."""

replicas = st.sampled_from(["a", "b"])
deliveries = st.booleans()


class TracedEngine(StreamEngine):
    """An engine that holds a prefix of CHAIN and remembers what it held after each batch."""

    def __init__(self, replica: str, *, boot_ns: int) -> None:
        super().__init__(boot_ns=boot_ns, replica=replica, max_replay=6)
        self.length_at: dict[tuple[int, int | None], int] = {(boot_ns, None): 0}
        self.ops: dict[int, IndexOp] = {}

    async def resize(self, length: int, *, delivered: bool) -> None:
        """Store or evict until a prefix of this length is held, in one batch."""
        before = len(self.held)
        self.length_at[self.boot_ns, self.next_seq] = length
        if length >= before:
            self.ops[self.next_seq] = stored(CHAIN[before:length])
            await self.store(CHAIN[before:length], delivered=delivered)
        else:
            self.ops[self.next_seq] = removed(CHAIN[length:before])
            await self.remove(CHAIN[length:before], delivered=delivered)

    async def restart(self, length: int) -> None:
        """Start again; the first batch of the new boot gets lost."""
        self.reboot(boot_ns=self.boot_ns + BOOT_STEP_NS)
        self.length_at[self.boot_ns, None] = 0
        self.ops.clear()
        await self.resize(length, delivered=False)


class TwoReplicas(RuleBasedStateMachine):
    """Two engines, their ingesters, and one Redis that may come up empty again."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="pf-property-"))
        self.server = RedisServer(self._folder)
        self.server.start()
        self.index = RedisIndex(connect(self.server.url), "pool")
        self.engines: dict[str, TracedEngine] = {}
        self.follows: dict[str, Follow] = {}
        self._await(self._start())

    async def _start(self) -> None:
        for replica in ("a", "b"):
            engine = TracedEngine(replica, boot_ns=BOOT_NS)
            self._stack.push_async_callback(engine.close)
            follow = following(
                engine, self.index, target=Target(replica), renew_s=0.05, lease_s=0.4
            )
            self.engines[replica] = engine
            self.follows[replica] = await self._stack.enter_async_context(follow)

    def _await(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(call)

    @rule(replica=replicas, length=st.integers(0, 40), delivered=deliveries)
    def change(self, replica: str, length: int, delivered: bool) -> None:
        self._await(self.engines[replica].resize(length, delivered=delivered))

    @rule(replica=replicas, back=st.integers(1, 8))
    def send_again(self, replica: str, back: int) -> None:
        """Deliver an old batch: again, late, or out of order."""
        engine = self.engines[replica]
        seq = engine.next_seq - back
        if seq in dict(engine._buffer):
            self._await(engine.send_again(seq))

    @rule(replica=replicas, length=st.integers(0, 40))
    def restart(self, replica: str, length: int) -> None:
        self._await(self.engines[replica].restart(length))

    @rule(replica=replicas)
    def lapse(self, replica: str) -> None:
        """Show no heartbeat until the lease is over."""
        follow = self.follows[replica]

        async def is_gone() -> bool:
            return all(state.target != follow.target for state in await self.index.states())

        async def lapse() -> None:
            follow.is_alive = False
            await until(is_gone)
            follow.is_alive = True

        self._await(lapse())

    @rule(replica=replicas, back=st.integers(1, 6))
    def race(self, replica: str, back: int) -> None:
        """A second ingester applies the same batches under the same epoch."""
        engine, epoch = self.engines[replica], self.follows[replica].ingester.epoch
        seqs = range(max(0, engine.next_seq - back), engine.next_seq)
        batches = [SequencedOps(seq, (engine.ops[seq],)) for seq in seqs]
        if epoch is not None and epoch // BOOT_STEP_NS == engine.boot_ns // BOOT_STEP_NS:
            self._await(self.index.apply(Target(replica), epoch, batches))

    @rule()
    def redis_comes_up_empty(self) -> None:
        self.server.restart()

    @rule(replica=replicas)
    def settle(self, replica: str) -> None:
        """Let one replica come to rest; the other goes on as it is."""
        self._await(self._at_rest(replica))

    @invariant()
    def what_is_credited_was_true(self) -> None:
        for replica in self.engines:
            self._await(self._is_true(replica))

    async def _is_true(self, replica: str) -> None:
        engine, target = self.engines[replica], Target(replica)
        try:
            held = await self.index.held(target, stored(CHAIN))
        except DependencyError:  # A connection of before the restart.
            held = await self.index.held(target, stored(CHAIN))
        if held is None:
            return
        boot_ns = held.epoch - (held.epoch - BOOT_NS) % BOOT_STEP_NS
        length = engine.length_at[boot_ns, held.applied_seq]
        assert held.missing == tuple(CHAIN[length:])

    async def _at_rest(self, replica: str) -> None:
        engine, follow = self.engines[replica], self.follows[replica]

        async def is_at_rest() -> bool:
            try:
                states = {state.target: state for state in await self.index.states()}
            except DependencyError:
                return False
            state = states.get(follow.target)
            return (
                follow.ingester.mode == "EXACT"
                and state is not None
                and state.num_blocks == {"gpu": len(engine.held), "host": 0}
                and await follow.matched() == len(engine.held)
                and state.report.mode == "EXACT"
            )

        try:
            await until(is_at_rest)
        except AssertionError:
            raise AssertionError(
                f"{follow.ingester.mode} {follow.ingester.reason} {follow.ingester.counters} "
                f"{await self.index.states()} held={len(engine.held)} seq={engine.next_seq}"
            ) from None

    def teardown(self) -> None:
        async def end() -> None:
            for replica in self.engines:
                await self._at_rest(replica)

        try:
            self._await(end())
        finally:
            self._await(self._stack.aclose())
            self._await(self.index.close())
            self._runner.close()
            self.server.kill()
            shutil.rmtree(self._folder, ignore_errors=True)


def explore(*, num_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        TwoReplicas,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_index_is_true_whatever_happens_to_events() -> None:
    explore(num_examples=3, num_steps=12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_index_is_true_whatever_happens_to_events_at_length() -> None:
    explore(num_examples=30, num_steps=40)
