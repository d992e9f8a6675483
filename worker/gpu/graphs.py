"""CUDA graphs: what captures and replays them, and callables that do as the dispatcher says.

Inputs and outputs of a graphed callable lie in buffers that stay where they are, so a replay takes
no arguments. Nothing here chooses a graph or pads a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch

from kvindex.foundation.errors import PrefixFleetError
from worker.gpu.dispatcher import Dispatch, GraphKey, GraphMode

Inputs = TypeVar("Inputs")


class UnexpectedCaptureError(PrefixFleetError):
    """Raised when a step is told to replay a graph that nobody has captured."""


class Graph(Protocol):
    """Recorded work on the device."""

    def replay(self) -> None:
        """Do the work again, on what the same buffers hold now."""
        ...


class GraphBackend(Protocol):
    """Records work. Implementations: CudaGraphs, and a fake in the tests."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` does on the device; it must have run before, for first-time work."""
        ...


class CudaGraphs:
    """Captures on a stream of its own; all graphs share one pool of memory.

    So no output may be read after another graph was replayed, and only one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record `work`; the garbage collector rests, as freeing device memory breaks a capture."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # Other threads may call the driver meanwhile: only our own calls are checked.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            if was_enabled:
                gc.enable()
        return graph


class CaptureGate:
    """Whether graphs may be captured now; closed while traffic is served."""

    def __init__(self) -> None:
        self.is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow captures for a while."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


class GraphedCallable(Generic[Inputs]):
    """A function over static buffers that is replayed where the dispatch names its mode.

    In any other mode it is called plainly.
    """

    def __init__(
        self,
        mode: GraphMode,
        function: Callable[[Dispatch, Inputs], None],
        backend: GraphBackend,
        gate: CaptureGate,
    ) -> None:
        self._mode = mode
        self._function = function
        self._backend = backend
        self._gate = gate
        self._graphs: dict[GraphKey, Graph] = {}

    def __call__(self, dispatch: Dispatch, inputs: Inputs) -> None:
        """Replay, capture or call; UnexpectedCaptureError if told to replay what is not there."""
        key = dispatch.key
        if key is None or key.mode is not self._mode:
            self._function(dispatch, inputs)
            return
        graph = self._graphs.get(key)
        if graph is None:
            if not self._gate.is_open:
                raise UnexpectedCaptureError(f"no graph was captured for {key}")
            graph = self._backend.capture(lambda: self._function(dispatch, inputs))
            self._graphs[key] = graph
        graph.replay()
