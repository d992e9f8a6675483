"""Threads that share a step: all take part, and the next step waits for those on their way out."""

from __future__ import annotations

import threading
import weakref

from worker.cpu.compiled.crew import Crew


def test_every_thread_gets_the_argument_and_its_own_number() -> None:
    crew, seen, barrier = Crew(3), [], threading.Barrier(3)

    def work(argument: int, thread: int) -> None:
        seen.append((argument, thread))
        barrier.wait()

    for argument in (7, 8):
        crew.run(work, argument)
        crew.settle()
    assert sorted(seen) == [(7, 0), (7, 1), (7, 2), (8, 0), (8, 1), (8, 2)]


def test_run_returns_with_the_callers_part_and_settle_waits_for_the_helpers() -> None:
    crew, may_end, ended = Crew(2), threading.Event(), []

    def work(argument: int, thread: int) -> None:
        if thread:
            may_end.wait()
            ended.append(thread)

    crew.run(work, 0)
    assert ended == []
    may_end.set()
    crew.settle()
    assert ended == [1]


def test_one_thread_needs_no_helper() -> None:
    seen: list[int] = []
    Crew(1).run(lambda argument, thread: seen.append(argument + thread), 5)
    assert seen == [5]


def test_helpers_end_with_the_crew() -> None:
    before = set(threading.enumerate())
    crew = Crew(3)
    helpers = set(threading.enumerate()) - before
    gone = weakref.ref(crew)
    del crew
    for helper in helpers:
        helper.join(timeout=10)
    assert gone() is None
    assert [helper.is_alive() for helper in helpers] == [False, False]
