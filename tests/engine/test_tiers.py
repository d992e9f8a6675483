"""Random traffic with a host tier, guaranteed shares and a pool whose size changes.

Whatever is stored, restored, evicted for whom, or given up with its slab: events tell what each
tier holds, and the tokens are those of the same request run alone and uncached.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from engine.config import QueuePolicy
from engine.frontend.errors import RequestError
from engine.scripted_executor import ScriptedExecutor
from tests.engine.drafting import Guesses
from tests.engine.hybrid import GROUPS, alone_with
from tests.engine.machine import TrafficMachine, machine_settings

_SLAB = 4


class TierMachine(TrafficMachine):
    """Random traffic, and beside it resizes and a device that runs out of memory."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        async_depth=st.integers(0, 2),
        tightness=st.integers(0, 2),
        num_host_blocks=st.sampled_from([0, 1, 3, 10, 60]),
        shares=st.sampled_from([{}, {"a": 0.5}, {"a": 0.3, "b": 0.7}]),
        budget=st.sampled_from([3, 8, 40]),
        guesses=st.sampled_from(["none", "right", "partly"]),
    )
    def start(
        self,
        groups: str,
        policy: QueuePolicy,
        async_depth: int,
        tightness: int,
        num_host_blocks: int,
        shares: dict[str, float],
        budget: int,
        guesses: Guesses,
    ) -> None:
        self.begin(
            groups,
            guesses=guesses,
            tightness=tightness,
            budget=budget,
            policy=policy,
            max_preemptions=2,
            max_prefill_share=0.5,
            async_depth=async_depth,
            num_host_blocks=num_host_blocks,
            kv_shares=shares,
            slab_blocks=_SLAB,
        )
        self.shortest_limit = self.core.max_model_len

    @rule(num_slabs=st.integers(5, 24))
    def resize(self, num_slabs: int) -> None:
        """Shrink or grow the pool, whatever runs."""
        for output in self.core.resize(num_slabs * _SLAB):
            assert output.finish_reason is not None
            self.run.finish[output.request_id] = output.finish_reason
        self.shortest_limit = min(self.shortest_limit, self.core.max_model_len)

    @precondition(lambda self: self.core.kv_cache.pool.num_blocks > 6 * _SLAB)
    @rule()
    def lose_device_memory(self) -> None:
        """Let others take memory of the device: the next step is one too many."""
        executor = self.core.executor
        assert isinstance(executor, ScriptedExecutor)
        executor.max_device_blocks = self.core.kv_cache.pool.num_blocks - 1
        while (
            self.core.has_work and executor.max_device_blocks < self.core.kv_cache.pool.num_blocks
        ):
            self.run.step()
        executor.max_device_blocks = None
        self.shortest_limit = min(self.shortest_limit, self.core.max_model_len)

    @precondition(lambda self: self.core.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request at whatever stage it is."""
        request_id = data.draw(st.sampled_from(sorted(self.core.scheduler.requests)))
        self.core.abort([request_id])
        del self.requests[request_id]
        self.to_come.pop(request_id, None)

    @precondition(lambda self: self.to_come)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """End an open prompt; abort it where the pool has become too small for that."""
        self.complete(data.draw(st.sampled_from(sorted(self.to_come))))

    def complete(self, request_id: str) -> None:
        """End an open prompt, if it is still there and there is room for it."""
        rest = self.to_come.pop(request_id)
        try:
            self.core.extend_prompt(request_id, rest, is_last=True)
        except RequestError:
            self.core.abort([request_id])
            del self.requests[request_id]

    def teardown(self) -> None:
        """Run to the end: all have their own tokens, up to the shortest limit there was."""
        if not hasattr(self, "core"):
            return
        self.core.resume()
        for request_id in list(self.to_come):
            self.complete(request_id)
        self.run.to_end()
        for request_id, request in self.requests.items():
            tokens = self.run.tokens.get(request_id, [])
            expected = alone_with(self.groups, request)
            assert tokens == expected[: len(tokens)]
            if len(tokens) < len(expected):
                assert self.run.finish[request_id] in ("length", "error")
                assert len(request.prompt_token_ids) + len(tokens) >= self.shortest_limit
        assert self.core.kv_cache.pool.num_free == self.core.kv_cache.pool.num_usable


class TierMachineAtLength(TierMachine):
    """The same machine with more examples."""


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = machine_settings(60)
TestTierMachineAtLength = pytest.mark.slow(pytest.mark.timeout(900)(TierMachineAtLength.TestCase))
TestTierMachineAtLength.settings = machine_settings(5000)
