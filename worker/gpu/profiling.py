"""Measures what a model on a GPU takes besides its KV cache, by running its largest step.

Which bytes mean what is worker.gpu.memory's business; the device is only asked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from worker.gpu.decoder import GpuDecoder
from worker.gpu.device import GpuDevice, MemoryUse
from worker.gpu.dispatcher import Dispatch, GraphDispatcher, GraphKey, GraphMode
from worker.gpu.memory import MemoryProfile
from worker.gpu.model import GpuModel
from worker.gpu.sampler import sample_on_device
from worker.gpu.step_buffers import StepBuffers
from worker.model.llama import KVCache
from worker.runner.sampling_state import SamplingRows


class Profiler:
    """Runs the largest step of a model and reads the device's counters around it.

    `before` is the device before the weights were loaded.
    """

    def __init__(
        self,
        device: GpuDevice,
        decoder: GpuDecoder,
        buffers: StepBuffers,
        *,
        before: MemoryUse,
        max_tokens: int,
        max_num_seqs: int,
        block_size: int,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._buffers = buffers
        self._max_tokens = max_tokens
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._weights = device.memory().allocated - before.allocated

    def measure(self, new_dispatcher: Callable[[], GraphDispatcher]) -> MemoryProfile:
        """Measure steps, then graphs, which are captured for that and thrown away."""
        cache = self._null_cache()
        profile = self.measure_steps(cache)
        first, further = self._measure_graphs(new_dispatcher(), cache)
        self._device.reset_peak()
        return MemoryProfile(
            weights=profile.weights,
            non_torch=profile.non_torch,
            activations=profile.activations,
            first_graph=first,
            next_graph=further,
        )

    @torch.inference_mode()
    def measure_steps(self, cache: KVCache) -> MemoryProfile:
        """Run the largest step over `cache`, into which nothing is written."""
        self._device.reset_peak()
        start = self._device.memory()
        self.run_largest_step(cache)
        end = self._device.memory()
        return MemoryProfile(
            weights=self._weights,
            non_torch=self._device.total_bytes - end.free - end.reserved,
            activations=end.peak - start.allocated,
        )

    @torch.inference_mode()
    def run_largest_step(self, cache: KVCache) -> None:
        """Compute every token and row there may be, and sample the most expensive way.

        All of it is padding, which takes the same memory. Decode runs for every number of splits
        too: so traffic finds each kernel compiled.
        """
        decoder, rows = self._decoder, self._max_num_seqs
        decoder.cache = cache
        for requests in sorted({1 << i for i in range(rows.bit_length())} | {rows}):
            self._run(min(requests, self._max_tokens), requests, tokens_per_request=1)
        self._run(self._max_tokens, min(rows, self._max_tokens), tokens_per_request=None)
        index = torch.arange(rows, device=self._device.torch_device) % self._max_tokens
        logits = decoder.logits(index).float()
        for top_p in (1.0, 0.9):
            sample_on_device(logits, _rows(rows, top_p))

    def _run(self, num_tokens: int, num_requests: int, *, tokens_per_request: int | None) -> None:
        dispatch = Dispatch(None, num_tokens, min(num_tokens, num_requests))
        self._buffers.fill_padding(dispatch)
        inputs = self._buffers.inputs(dispatch, tokens_per_request=tokens_per_request)
        for layer in range(self._decoder.num_pieces - 1):
            self._decoder.piece(layer, dispatch, inputs)
            self._decoder.attend(layer, inputs)
        self._decoder.piece(self._decoder.num_pieces - 1, dispatch, inputs)

    @torch.inference_mode()
    def _measure_graphs(self, dispatcher: GraphDispatcher, cache: KVCache) -> tuple[int, int]:
        """Return the bytes of the first graph, and of the costlier of those tried after it."""
        keys = dispatcher.all_keys()
        if not keys:
            return 0, 0
        model = GpuModel(self._decoder, self._buffers, dispatcher, self._device.graph_backend())
        first, *others = [self._cost(model, key, cache) for key in _to_try(keys)]
        return first, max(others, default=0)

    def _cost(self, model: GpuModel, key: GraphKey, cache: KVCache) -> int:
        self._device.reset_peak()
        before = self._device.memory().free
        model.capture(key, cache)
        self._device.reset_peak()
        return max(0, before - self._device.memory().free)

    def _null_cache(self) -> KVCache:
        """Return a cache of the null block alone."""
        config = self._decoder.config
        shape = (config.num_layers, 1, self._block_size, config.num_kv_heads, config.head_dim)
        keys, values = (
            torch.zeros(shape, dtype=self._decoder.dtype, device=self._device.torch_device)
            for _ in range(2)
        )
        return KVCache(keys, values)


def _to_try(keys: list[GraphKey]) -> list[GraphKey]:
    """Return the largest two graphs, and the largest full one."""
    full = [key for key in keys if key.mode is GraphMode.FULL][:1]
    return list(dict.fromkeys([*keys[:2], *full]))


def _rows(count: int, top_p: float) -> SamplingRows:
    zeros = np.zeros(count, np.int64)
    return SamplingRows(
        temperature=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        top_k=zeros,
        top_p=np.full(count, top_p),
        seed=zeros.view(np.uint64),
        choice=zeros.view(np.uint64),
        position=zeros,
        masked={},
        adjusted=[],
    )
