"""Whatever the schedule, the tokens are those of the same request run alone and uncached.

The scripted executor's next token hashes all KV contents it reads: a wrong, stale or unwritten
block would show.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.build import BLOCK_SIZE, Run, alone, make_core, make_request
from tests.engine.machine import TrafficMachine, machine_settings


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


class TrafficMachineAtLength(TrafficMachine):
    """The same machine with more examples."""


TestTrafficMachine = TrafficMachine.TestCase
TestTrafficMachine.settings = machine_settings(200)
TestTrafficMachineAtLength = pytest.mark.slow(
    pytest.mark.timeout(900)(TrafficMachineAtLength.TestCase)
)
TestTrafficMachineAtLength.settings = machine_settings(2000)
