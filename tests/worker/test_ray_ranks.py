"""Ranks as actors of a Ray cluster: the same tokens, and a dead one is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from tests.engine.build import Run, alone, make_request
from tests.worker.model_fixtures import (
    VOCAB_SIZE,
    EngineRun,
    executor_for,
    greedy,
    random_prompts,
    write_tiny_model,
)
from tests.worker.test_ranks import ranks_spec
from worker.core.spec import CoreSpec
from worker.executors.process import ProcessExecutor

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


def executor_of(spec: CoreSpec) -> ProcessExecutor:
    from worker.executors.ray_ranks import RayRanks

    return ProcessExecutor(spec, launch=RayRanks)


def test_two_actors_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    prompts = random_prompts(3, lengths=[5, 40, 70], vocab_size=VOCAB_SIZE)
    expected = EngineRun(executor_for(folder), EngineConfig()).generate(prompts, greedy(8))
    executor = executor_of(
        CoreSpec(
            replica_id="r0",
            engine=EngineConfig(),
            model_folder=str(folder),
            dtype="float32",
            num_threads=2,
            num_blocks=512,
            tensor_parallel_size=2,
        )
    )
    try:
        assert EngineRun(executor, EngineConfig()).generate(prompts, greedy(8)) == expected
    finally:
        executor.close()


def test_an_actor_that_dies_has_all_replaced_and_no_request_lost() -> None:
    spec = ranks_spec()
    executor = executor_of(spec)
    try:
        core = EngineCore(spec.engine, executor, SystemClock())
        request = make_request("a", range(30), max_tokens=6)
        core.add(request)
        run = Run(core)
        run.step()
        before = executor.pids
        os.kill(before[1], signal.SIGKILL)
        run.to_end()
        assert run.tokens == {"a": alone(request)}
        assert set(executor.pids).isdisjoint(before)
    finally:
        executor.close()


def test_an_actor_that_cannot_load_says_why(tmp_path: Path) -> None:
    spec = CoreSpec(
        replica_id="r0",
        engine=EngineConfig(),
        model_folder=str(tmp_path),
        num_threads=2,
        tensor_parallel_size=2,
    )
    with pytest.raises(DependencyError, match=r"r0 cannot start: .*config\.json is missing"):
        executor_of(spec)
