"""Ranks that die, stand still or part from the others are replaced together; nothing hangs.

Scripted ranks: what an executor does with several processes does not depend on a model.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engine.core import EngineCore
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from tests.engine.build import Run, alone, make_request
from tests.worker.core.build import CONFIG, children, exists, scripted_spec
from tests.worker.strange_rank import FAULT
from worker.core.spec import CoreSpec
from worker.executors.process import ProcessExecutor
from worker.executors.rank_processes import RUNNER_MODULE, RankProcesses
from worker.executors.ranks import RanksLostError

STRANGE = "tests.worker.strange_rank"
REQUEST = make_request("a", range(30), max_tokens=6)
SIBLING = make_request("b", range(30), max_tokens=6, temperature=0.8, seed=3)


def ranks_spec(size: int = 2, *, async_depth: int = 0) -> CoreSpec:
    engine = msgspec.structs.replace(
        CONFIG, max_num_batched_tokens=8, max_step_s=0.0, async_depth=async_depth
    )
    return msgspec.structs.replace(scripted_spec(), engine=engine, tensor_parallel_size=size)


@contextmanager
def running_core(
    *, async_depth: int = 0, agreement_s: float = 10.0, module: str = RUNNER_MODULE
) -> Iterator[tuple[EngineCore, ProcessExecutor]]:
    spec = ranks_spec(async_depth=async_depth)
    executor = ProcessExecutor(
        spec, agreement_s=agreement_s, launch=partial(RankProcesses, module=module)
    )
    try:
        yield EngineCore(spec.engine, executor, SystemClock()), executor
    finally:
        executor.close()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_that_dies_has_all_replaced_and_no_request_lost(depth: int, rank: int) -> None:
    with running_core(async_depth=depth) as (core, executor):
        core.add(REQUEST)
        core.add(SIBLING)
        run = Run(core)
        run.step()
        before = executor.pids
        os.kill(before[rank], signal.SIGKILL)
        run.to_end()
        assert run.tokens == {"a": alone(REQUEST), "b": alone(SIBLING)}
        assert set(executor.pids).isdisjoint(before)
        assert not any(map(exists, before))
        assert core.stats().resyncs_total == 1


def test_a_rank_that_stands_still_does_not_hold_up_the_others() -> None:
    with running_core(agreement_s=0.2) as (core, executor):
        core.add(REQUEST)
        run = Run(core)
        run.step()
        before = executor.pids
        os.kill(before[1], signal.SIGSTOP)
        run.to_end()
        assert run.tokens == {"a": alone(REQUEST)}
        assert set(executor.pids).isdisjoint(before)


def test_a_rank_that_samples_other_tokens_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FAULT, "other_tokens")
    with running_core(agreement_s=0.2, module=STRANGE) as (core, _):
        monkeypatch.delenv(FAULT)
        core.add(make_request("short", [7, 8, 9], max_tokens=6))
        run = Run(core).to_end()
        assert run.tokens == {"short": alone(make_request("short", [7, 8, 9], max_tokens=6))}
        assert core.stats().resyncs_total == 1


def test_memory_that_one_rank_lacks_costs_a_slab_and_the_cache_but_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FAULT, "out_of_memory")
    with running_core(agreement_s=0.2, module=STRANGE) as (core, _):
        monkeypatch.delenv(FAULT)
        core.add(REQUEST)
        core.add(SIBLING)
        run = Run(core).to_end()
        assert run.tokens == {"a": alone(REQUEST), "b": alone(SIBLING)}
        assert core.kv_cache.pool.num_blocks == 64 - CONFIG.slab_blocks
        assert core.stats().resyncs_total == 1


def test_a_death_in_the_middle_of_a_step_is_noticed_within_a_tenth_of_a_second(
    tmp_path: Path,
) -> None:
    assert min(seconds_until_a_death_is_noticed(tmp_path) for _ in range(3)) < 0.1


def seconds_until_a_death_is_noticed(folder: Path) -> float:
    ranks = RankProcesses(ranks_spec(), folder)
    try:
        ready = [ranks.receive(None) for _ in range(2)]
        assert {answer[0] for answer in ready if answer is not None} == {0, 1}
        os.kill(ranks.pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RanksLostError, match="rank 1 ended with exit code -9"):
            ranks.receive(None)
        return time.monotonic() - started
    finally:
        ranks.stop()


def test_a_rank_that_cannot_start_ends_all_of_them() -> None:
    before = children()
    with pytest.raises(DependencyError, match=r"r0 cannot start: rank \d ended with exit code 1"):
        ProcessExecutor(
            ranks_spec(), launch=partial(RankProcesses, module="tests.worker.no_such_module")
        )
    assert children() == before
