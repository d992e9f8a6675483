"""Graphed callables do as the dispatch says, and nothing on their own."""

from __future__ import annotations

import pytest

from tests.worker.gpu.gpu_fixtures import FakeGraphs
from worker.gpu.dispatcher import Dispatch, GraphKey, GraphMode
from worker.gpu.graphs import CaptureGate, GraphedCallable, UnexpectedCaptureError

FULL = Dispatch(GraphKey(GraphMode.FULL, 4, 4, is_uniform=True), 4, 4)
OTHER = Dispatch(GraphKey(GraphMode.FULL, 2, 2, is_uniform=True), 2, 2)
PIECEWISE = Dispatch(GraphKey(GraphMode.PIECEWISE, 4, None, is_uniform=False), 4, 3)
EAGER = Dispatch(None, 4, 3)


class Counter:
    """A function over a static buffer, which notes who called it with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[GraphMode, list[int]]] = []

    def __call__(self, dispatch: Dispatch, inputs: list[int]) -> None:
        self.calls.append((dispatch.mode, inputs))


def graphed(counter: Counter) -> tuple[GraphedCallable[list[int]], FakeGraphs, CaptureGate]:
    backend, gate = FakeGraphs(), CaptureGate()
    return GraphedCallable(GraphMode.FULL, counter, backend, gate), backend, gate


def test_another_mode_is_a_plain_call() -> None:
    counter = Counter()
    call, backend, _ = graphed(counter)
    call(EAGER, [1])
    call(PIECEWISE, [2])
    assert counter.calls == [(GraphMode.NONE, [1]), (GraphMode.PIECEWISE, [2])]
    assert backend.graphs == []


def test_a_graph_is_captured_once_and_then_replayed_on_the_buffers_of_its_capture() -> None:
    counter = Counter()
    call, backend, gate = graphed(counter)
    static = [0]
    with gate.opened():
        call(FULL, static)
    static[0] = 7
    call(FULL, [99])
    assert [graph.num_replays for graph in backend.graphs] == [2]
    assert [inputs is static for _, inputs in counter.calls] == [True, True]


def test_a_replay_of_what_was_not_captured_is_an_error() -> None:
    call, backend, gate = graphed(Counter())
    with gate.opened():
        call(FULL, [])
    with pytest.raises(UnexpectedCaptureError, match="num_tokens=2"):
        call(OTHER, [])
    assert len(backend.graphs) == 1


def test_the_gate_closes_although_a_capture_fails() -> None:
    gate = CaptureGate()
    with pytest.raises(MemoryError), gate.opened():
        raise MemoryError
    assert not gate.is_open
