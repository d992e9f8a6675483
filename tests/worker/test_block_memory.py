"""The bytes of KV blocks on a CPU: moves between the tiers, and memory that is given back."""

from __future__ import annotations

import mmap

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.executor import OutOfDeviceMemoryError, execute
from engine.output import SchedulerOutput
from engine.transfer import BlockCopy, BlockTransfer, HostLoad, HostStore
from kvindex.foundation.errors import ConfigError
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    greedy,
    new_request,
    random_prompts,
    step_of,
    write_tiny_model,
)
from worker.executors.uniproc import UniprocExecutor
from worker.runner.block_memory import BlockMemory
from worker.runner.memory import check_host_tier

NUM_LAYERS = 2


def numbered(num_blocks: int, *, num_host_blocks: int = 0, head_dim: int = 8) -> BlockMemory:
    """Build memory whose block i holds i + 1 in every key and -(i + 1) in every value."""
    memory = BlockMemory(
        num_layers=NUM_LAYERS,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_shape=(4, 2, head_dim),
        dtype=torch.float32,
    )
    for block_id in range(num_blocks):
        memory.cache.keys[:, block_id] = block_id + 1
        memory.cache.values[:, block_id] = -(block_id + 1)
    return memory


def contents(memory: BlockMemory) -> list[float]:
    """Return what each block holds, after checking that it is the same all over."""
    keys, values = memory.cache.keys, memory.cache.values
    assert torch.equal(keys, -values)
    per_block = keys.transpose(0, 1).flatten(1)
    assert torch.equal(per_block.amin(1), per_block.amax(1))
    return [float(x) for x in per_block.amax(1)]


def test_a_stored_block_comes_back_elsewhere() -> None:
    memory = numbered(4, num_host_blocks=2)
    memory.move([HostStore(1, 0), HostStore(2, 1)])
    memory.move([HostLoad(0, 3), HostLoad(1, 1)])
    assert contents(memory) == [1.0, 3.0, 3.0, 2.0]


def test_moves_are_carried_out_in_order() -> None:
    memory = numbered(4, num_host_blocks=1)
    seconds = memory.move([HostStore(1, 0), BlockCopy(2, 1), HostLoad(0, 2), BlockCopy(2, 3)])
    assert contents(memory) == [1.0, 3.0, 2.0, 2.0]
    assert seconds > 0


def test_only_moves_between_the_tiers_are_timed() -> None:
    assert numbered(3).move([]) == 0.0


def test_memory_of_given_up_blocks_is_gone_and_the_rest_is_kept() -> None:
    """A block is two pages in every layer."""
    memory = numbered(6, head_dim=2 * mmap.PAGESIZE // (4 * 2 * 4))
    memory.resize(2)
    assert contents(memory) == [1.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    memory.resize(6)
    memory.cache.keys[:, 4], memory.cache.values[:, 4] = 7.0, -7.0
    assert contents(memory) == [1.0, 2.0, 0.0, 0.0, 7.0, 0.0]


def test_blocks_smaller_than_a_page_share_it_with_those_that_stay() -> None:
    memory = numbered(4)
    memory.resize(3)
    assert contents(memory)[:3] == [1.0, 2.0, 3.0]


def test_a_host_tier_that_does_not_fit_names_the_setting_and_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"engine\.num_host_blocks 11 .* set it to 10 or less"):
        check_host_tier(num_host_blocks=11, bytes_per_block=100, available_bytes=1000)
    check_host_tier(num_host_blocks=10, bytes_per_block=100, available_bytes=1000)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> UniprocExecutor:
    """A tiny model with a host tier."""
    return UniprocExecutor(
        write_tiny_model(tmp_path_factory.mktemp("tiny")),
        dtype="float32",
        engine_config=EngineConfig(num_host_blocks=40),
        num_threads=1,
        num_blocks=16,
    )


FIRST, SECOND = random_prompts(2, lengths=[20, 16], vocab_size=VOCAB_SIZE)


def step_with(
    step: SchedulerOutput,
    *,
    transfers: list[BlockTransfer] | None = None,
    num_blocks: int | None = None,
) -> SchedulerOutput:
    """Add moves, or another size of the pool, to a step."""
    return msgspec.structs.replace(step, transfers=transfers or [], num_blocks=num_blocks)


def test_a_model_reads_what_was_brought_back(executor: UniprocExecutor) -> None:
    step = step_of(new=[new_request("a", FIRST, [1, 2])], scheduled={"a": 20})
    first = execute(executor, step)
    step = step_of(dropped=["a"], new=[new_request("b", SECOND, [1])], scheduled={"b": 16})
    execute(executor, step_with(step, transfers=[HostStore(1, 3)]))
    again = new_request("c", FIRST, [7, 8], num_computed=16)
    step = step_of(dropped=["b"], new=[again], scheduled={"c": 4})
    restored = execute(executor, step_with(step, transfers=[HostLoad(3, 7)]))
    execute(executor, step_of(dropped=["c"]))
    assert restored.sampled_token_ids["c"] == first.sampled_token_ids["a"]
    assert restored.transfer_s > 0


def test_an_engine_under_pressure_gives_the_tokens_of_one_with_room(
    executor: UniprocExecutor,
) -> None:
    """Three rounds of prompts that together do not fit the pool; the last comes from the host."""
    prompts = random_prompts(4, lengths=[70, 90], vocab_size=VOCAB_SIZE)
    config = EngineConfig(num_host_blocks=40, max_num_seqs=2, check_integrity=True)
    pressed = EngineRun(executor, config)
    rounds = [pressed.generate(prompts, greedy(4)) for _ in range(3)]
    assert pressed.core.kv_cache.pool.host is not None
    assert pressed.core.kv_cache.pool.host.num_loaded > 0
    assert pressed.num_cached == [64, 80, 64, 80]
    alone = EngineRun(executor, EngineConfig(max_num_seqs=1, enable_prefix_caching=False))
    assert rounds == [[alone.generate([p], greedy(4))[0] for p in prompts]] * 3


def test_out_of_memory_voids_every_step_until_a_resync(
    executor: UniprocExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = executor._runner
    assert runner is not None

    def exhaust(*_: object, **__: object) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "forward", exhaust)
        step = step_of(new=[new_request("a", FIRST, [1, 2])], scheduled={"a": 16})
        with pytest.raises(OutOfDeviceMemoryError, match="can't allocate memory"):
            execute(executor, step)
    with pytest.raises(OutOfDeviceMemoryError, match="a step before this one"):
        execute(executor, step_of(scheduled={"a": 4}, computed={"a": 16}))
    again = new_request("a", FIRST, [3, 4])
    step = step_of(dropped=["a"], new=[again], scheduled={"a": 20})
    output = execute(executor, msgspec.structs.replace(step, num_blocks=12, resync=True))
    assert list(output.sampled_token_ids) == ["a"]
    execute(executor, step_of(dropped=["a"]))
