"""A GPU decoder whose passes run in CUDA graphs where the dispatcher says so.

Two layers of graphs over the same code: each piece between attentions, and the whole pass.
"""

from __future__ import annotations

from functools import partial

from worker.gpu.decoder import GpuDecoder
from worker.gpu.dispatcher import Dispatch, GraphMode
from worker.gpu.graphs import CaptureGate, GraphBackend, GraphedCallable
from worker.gpu.step_buffers import StepInputs


class GraphedModel:
    """Runs passes as dispatched; captures only when told to."""

    def __init__(self, decoder: GpuDecoder, backend: GraphBackend) -> None:
        self.decoder = decoder
        self._gate = CaptureGate()
        self._pieces = [
            GraphedCallable(GraphMode.PIECEWISE, partial(decoder.piece, index), backend, self._gate)
            for index in range(decoder.num_pieces)
        ]
        self._whole = GraphedCallable(GraphMode.FULL, self._run, backend, self._gate)

    def run(self, dispatch: Dispatch, inputs: StepInputs) -> None:
        """Compute one pass over the buffers that `inputs` views; see `GpuDecoder.logits`."""
        self._whole(dispatch, inputs)

    def capture(self, dispatch: Dispatch, inputs: StepInputs) -> None:
        """Run a pass eagerly, for kernels that compile at first use, then capture and replay it."""
        self._run(Dispatch(None, dispatch.num_tokens, dispatch.num_requests), inputs)
        with self._gate.opened():
            self.run(dispatch, inputs)

    def _run(self, dispatch: Dispatch, inputs: StepInputs) -> None:
        *before, last = self._pieces
        for layer, piece in enumerate(before):
            piece(dispatch, inputs)
            self.decoder.attend(layer, inputs)
        last(dispatch, inputs)
