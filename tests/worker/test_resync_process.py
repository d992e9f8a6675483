"""A runner process that dies is replaced, and no request notices more than a delay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.resync import MAX_RESYNCS
from engine.step_stream import OutOfStepError
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import DependencyError
from tests.engine.build import Run, alone, make_request
from tests.worker.core.build import children, exists, scripted_spec
from worker.core.spec import CoreSpec
from worker.executors.process import ProcessExecutor

REQUESTS = [
    make_request("long", range(30), max_tokens=6),
    make_request("sibling", range(30), max_tokens=6, temperature=0.8, seed=3),
    make_request("short", [7, 8, 9], max_tokens=12),
]


def runner_spec(**settings: object) -> CoreSpec:
    engine = {
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "watermark": 0.0,
        "max_step_s": 0.0,
        "max_prefill_share": 1.0,
        "check_integrity": True,
    }
    config = msgspec.convert({**engine, **settings}, EngineConfig)
    return msgspec.structs.replace(scripted_spec(), engine=config)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition is true; TimeoutError after ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("not true after 10 s")
        time.sleep(0.005)


@contextmanager
def running_core(**settings: object) -> Iterator[tuple[EngineCore, ProcessExecutor]]:
    spec = runner_spec(**settings)
    executor = ProcessExecutor(spec)
    try:
        yield EngineCore(spec.engine, executor, SystemClock()), executor
    finally:
        executor.close()
        executor.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_runner_killed_in_a_chunked_prefill_is_replaced(depth: int) -> None:
    with running_core(async_depth=depth) as (core, executor):
        for request in REQUESTS:
            core.add(request)
        run = Run(core)
        for _ in range(2):
            run.step()
        assert 0 < core.scheduler.requests["long"].num_computed_tokens < 30
        victim = executor.pid
        os.kill(victim, signal.SIGKILL)
        run.to_end()
        assert run.tokens == {request.request_id: alone(request) for request in REQUESTS}
        assert executor.pid != victim
        assert not exists(victim)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_runner_that_misses_a_number_refuses_and_is_resynced(depth: int) -> None:
    with running_core(async_depth=depth) as (core, executor):
        for request in REQUESTS:
            core.add(request)
        run = Run(core)
        for _ in range(3):
            run.step()
        pid = executor.pid
        core.scheduler.step += 1
        run.to_end()
        assert run.tokens == {request.request_id: alone(request) for request in REQUESTS}
        assert core.stats().resyncs_total == 1
        assert executor.pid == pid


def test_a_runner_killed_while_idle_is_replaced_when_the_next_request_comes() -> None:
    with running_core() as (core, executor):
        core.add(REQUESTS[0])
        Run(core).to_end()
        victim = executor.pid
        os.kill(victim, signal.SIGKILL)
        # Its sockets are closed for sure once it is a zombie.
        status = Path(f"/proc/{victim}/stat")
        wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")
        core.add(REQUESTS[1])
        run = Run(core).to_end()
        assert run.tokens == {"sibling": alone(REQUESTS[1])}


def test_a_runner_that_dies_again_and_again_is_given_up() -> None:
    with running_core() as (core, executor):
        core.add(REQUESTS[0])
        for _ in range(MAX_RESYNCS):
            os.kill(executor.pid, signal.SIGKILL)
            assert core.step() == []
        os.kill(executor.pid, signal.SIGKILL)
        with pytest.raises(OutOfStepError, match="exit code -9"):
            core.step()


def test_a_runner_that_cannot_start_or_hangs_at_its_start_says_so() -> None:
    before = children()
    with pytest.raises(DependencyError, match="runner of r0 was not ready in 0 s"):
        ProcessExecutor(runner_spec(), start_timeout_s=0)
    assert children() == before


def test_closing_leaves_no_process() -> None:
    with running_core() as (_, executor):
        pid = executor.pid
    assert not exists(pid)
