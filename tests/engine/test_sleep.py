"""An engine that sleeps keeps its requests, loses its cache, and wakes with the same tokens."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import ExecutorInfo
from engine.messages import SleepLevel
from engine.scripted_executor import ScriptedExecutor
from engine.sleep import require_same_shape
from kvindex.events import AllBlocksCleared
from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import ConfigError, DependencyError
from tests.engine.build import Run, alone, make_core, make_request, run
from tests.engine.lossy_executor import LossyExecutor

LEVELS: list[SleepLevel] = [1, 2]


@pytest.mark.fault("engine-29")
@pytest.mark.parametrize("level", LEVELS)
def test_after_a_sleep_the_same_prompt_has_the_same_tokens_and_no_hit(level: SleepLevel) -> None:
    core = make_core()
    warm = run(core, make_request("warm", range(20)))
    core.take_events()
    core.sleep(level)
    assert core.take_events() == [AllBlocksCleared()]
    assert (core.stats().sleep_level, core.stats().num_cached_blocks) == (level, 0)
    core.wake_up()
    again = run(core, make_request("again", range(20)))
    assert again.tokens["again"] == warm.tokens["warm"]
    assert again.cached["again"] == 0
    assert core.stats().sleep_level is None


@pytest.mark.parametrize("async_depth", [0, 1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_requests_that_run_when_it_falls_asleep_lose_no_token(
    level: SleepLevel, async_depth: int
) -> None:
    core = make_core(async_depth=async_depth)
    requests = [make_request(f"{i}", range(i, i + 20), max_tokens=9) for i in range(3)]
    for request in requests:
        core.add(request)
    running = Run(core)
    for _ in range(3):
        running.step()
    for output in core.sleep(level):
        running.tokens[output.request_id] += output.token_ids
    assert not core.has_work
    core.add(make_request("late", range(50, 70)))
    assert not core.has_work, "it sleeps, whatever comes"
    core.wake_up()
    running.to_end()
    for request in requests:
        assert running.tokens[request.request_id] == alone(request)
    assert running.tokens["late"] == alone(make_request("late", range(50, 70)))


def test_a_request_that_is_aborted_asleep_is_gone() -> None:
    core = make_core()
    core.add(make_request("a", range(20)))
    core.step()
    core.sleep(1)
    core.abort(["a"])
    core.wake_up()
    assert Run(core).to_end().tokens == {}
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_a_sleeping_runner_is_told_to_give_its_blocks_back_and_later_to_take_them() -> None:
    core = make_core(num_blocks=64)
    run(core, make_request("warm", range(20)))
    executor = core.executor
    assert isinstance(executor, ScriptedExecutor)
    core.sleep(1)
    assert executor.num_blocks == 1
    core.wake_up()
    run(core, make_request("again", range(20)))
    assert executor.num_blocks == 64


def test_a_pool_that_is_resized_asleep_has_its_new_size_awake() -> None:
    core = make_core(num_blocks=64, slab_blocks=16)
    core.sleep(1)
    core.resize(32)
    assert not core.has_work
    core.wake_up()
    again = run(core, make_request("again", range(20)))
    assert again.tokens["again"] == alone(make_request("again", range(20)))
    assert isinstance(core.executor, ScriptedExecutor)
    assert core.executor.num_blocks == 32


def test_sleep_deepens_and_never_becomes_lighter() -> None:
    core = make_core()
    levels: list[SleepLevel] = [1, 2, 1]
    seen = []
    for level in levels:
        core.sleep(level)
        seen.append(core.stats().sleep_level)
    assert seen == [1, 2, 2]
    core.wake_up()
    core.wake_up()
    assert core.stats().sleep_level is None


def test_an_executor_without_reload_sleeps_lightly_only() -> None:
    lossy = LossyExecutor(lambda: ScriptedExecutor(num_blocks=64, block_size=16), {})
    core = EngineCore(EngineConfig(), lossy, VirtualClock())
    with pytest.raises(ConfigError, match="only level 1 is served"):
        core.sleep(2)
    assert core.stats().sleep_level is None
    core.sleep(1)
    assert core.stats().sleep_level == 1


@pytest.mark.fault("engine-29")
def test_other_weights_hit_nothing_of_the_old_ones() -> None:
    core = make_core()
    before = core.info(boot_ns=1).execution_digest
    old = run(core, make_request("old", range(20)))
    core.take_events()
    outputs, problem = core.update_weights("/models/new")
    assert (outputs, problem) == ([], None)
    assert core.take_events() == [AllBlocksCleared()]
    new = run(core, make_request("new", range(20)))
    assert new.cached["new"] == 0
    assert new.tokens["new"] != old.tokens["old"]
    assert core.info(boot_ns=1).execution_digest != before


def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving() -> None:
    class Picky(ScriptedExecutor):
        def reload(self, model_folder: str | None = None) -> None:
            if model_folder is not None:
                raise DependencyError(f"{model_folder} does not exist")
            super().reload()

    core = EngineCore(EngineConfig(), Picky(num_blocks=64, block_size=16), VirtualClock())
    old = run(core, make_request("old", range(20)))
    assert core.update_weights("/gone") == ([], "/gone does not exist")
    assert core.stats().sleep_level is None
    assert run(core, make_request("new", range(20))).tokens["new"] == old.tokens["old"]


def test_a_checkpoint_of_another_shape_is_refused_by_field() -> None:
    old = ExecutorInfo(num_blocks=8, max_model_len=64, vocab_size=100, execution_digest="a")
    require_same_shape(old, msgspec.structs.replace(old, execution_digest="b"))
    wider = ExecutorInfo(num_blocks=8, max_model_len=64, vocab_size=200, execution_digest="b")
    with pytest.raises(ConfigError, match="vocab_size=200, this engine vocab_size=100"):
        require_same_shape(old, wider)
