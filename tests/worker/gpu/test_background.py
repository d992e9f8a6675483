"""Captures and checks fill the pauses of the model's thread, and hold steps up rarely."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from worker.gpu.background import HOT_MISSES, STEPS_BETWEEN, BackgroundWork
from worker.gpu.dispatcher import GraphDispatcher, GraphKey
from worker.gpu.model_thread import ModelThread


class Captures:
    """A dispatcher with graphs of 2 and 4 tokens, and what was captured of them."""

    def __init__(self, *checks: Callable[[], object]) -> None:
        self.dispatcher = GraphDispatcher("piecewise", [2, 4], max_num_seqs=4)
        self.done: list[int] = []
        self.work = BackgroundWork(self.dispatcher, self.capture, list(checks))

    def capture(self, key: GraphKey) -> None:
        self.done.append(key.num_tokens)
        self.dispatcher.mark_captured(key)

    def miss(self, num_tokens: int, times: int) -> None:
        for _ in range(times):
            self.dispatcher.dispatch(num_tokens=num_tokens, num_requests=1, is_uniform=False)


def test_an_idle_model_checks_first_then_captures_everything() -> None:
    captures = Captures(lambda: captures.done.append(0))
    captures.miss(2, times=1)
    while not captures.work.is_done:
        captures.work.when_idle()
    captures.work.when_idle()
    assert captures.done == [0, 2, 4]


def test_a_busy_model_captures_only_what_is_hot_and_only_now_and_then() -> None:
    captures = Captures(lambda: captures.done.append(0))
    captures.miss(2, times=HOT_MISSES - 1)
    for _ in range(2 * STEPS_BETWEEN):
        captures.work.between_jobs()
    assert captures.done == []
    captures.miss(2, times=1)
    captures.miss(4, times=HOT_MISSES)
    captures.work.between_jobs()
    assert len(captures.done) == 1
    for _ in range(STEPS_BETWEEN - 1):
        captures.work.between_jobs()
    assert len(captures.done) == 1
    captures.work.between_jobs()
    assert captures.done == [4, 2]


def test_jobs_run_in_order_and_their_errors_reach_who_waits() -> None:
    thread = ModelThread("t")
    seen: list[int] = []
    futures = [thread.run(lambda i=i: seen.append(i)) for i in range(5)]  # type: ignore[misc]
    failing = thread.run(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert seen == list(range(5))
    assert all(future.done() for future in futures)
    thread.stop()


def test_background_work_runs_on_the_models_thread_until_nothing_is_left() -> None:
    thread = ModelThread("t")
    owner = thread.run(threading.get_ident).result()
    idents: list[int] = []
    captures = Captures(lambda: idents.append(threading.get_ident()))
    thread.set_background(captures.work)
    thread.wait_until_quiet()
    assert captures.done == [4, 2]
    assert idents == [owner]
    thread.stop()


def test_background_work_that_fails_is_given_up_and_jobs_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = ModelThread("t")
    captures = Captures(lambda: 1 // 0)
    thread.set_background(captures.work)
    thread.wait_until_quiet()
    assert captures.done == []
    assert "given up" in caplog.text
    assert thread.run(lambda: 7).result() == 7
    thread.stop()
