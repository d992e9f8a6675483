"""A causal language model on a GPU, as the runner sees one: a batch in, logits out.

It stages the batch, asks the dispatcher how to run it, and runs it so. Batches come from the CPU;
logits stay on the device. It knows no requests and samples nothing.
"""

from __future__ import annotations

import logging
import time

import torch

from worker.cpu.attention import AttentionPlan
from worker.gpu.decoder import GpuDecoder
from worker.gpu.dispatcher import Dispatch, GraphDispatcher, GraphKey, GraphMode
from worker.gpu.graphed_model import GraphedModel
from worker.gpu.graphs import GraphBackend
from worker.gpu.step_buffers import StepBuffers
from worker.model.config import ModelConfig
from worker.model.llama import KVCache
from worker.model.lora import NO_ADAPTERS, BatchAdapters

_log = logging.getLogger("prefixfleet.worker.gpu")


class GpuModel:
    """Implements worker.model.causal_lm.CausalLM.

    Every pass must get the same `cache` once a graph is captured: graphs hold its address.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        buffers: StepBuffers,
        dispatcher: GraphDispatcher,
        backend: GraphBackend,
    ) -> None:
        self.dispatcher = dispatcher
        self._decoder = decoder
        self._buffers = buffers
        self._graphed = GraphedModel(decoder, backend)

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return self._decoder.config

    @property
    def dtype(self) -> torch.dtype:
        """The precision of weights and activations."""
        return self._decoder.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every pass reads."""
        return self._decoder.weight_bytes

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: KVCache,
        plan: AttentionPlan,
        rows: torch.Tensor,
        adapters: BatchAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Compute a flattened batch; write its KV; return float32 logits of `rows`, on the device.

        See CausalLM. A batch in which an adapter runs is computed without graphs.
        """
        per_request = self._tokens_per_request(plan)
        num_tokens, num_requests = len(token_ids), len(plan.num_queries)
        dispatch = Dispatch(None, num_tokens, num_requests)
        if not adapters.groups:
            dispatch = self.dispatcher.dispatch(
                num_tokens=num_tokens,
                num_requests=num_requests,
                is_uniform=per_request == self.dispatcher.tokens_per_decode,
            )
        self._buffers.fill(token_ids, positions, plan, rows, dispatch=dispatch)
        self._decoder.cache = cache
        with self._decoder.adapted(adapters):
            self._run(dispatch, per_request)
        return self._decoder.logits(self._buffers.rows(len(rows))).float()

    def capture(self, key: GraphKey, cache: KVCache) -> None:
        """Capture one graph, between two batches; nothing is written to the cache."""
        started = time.perf_counter()
        dispatch = self.dispatcher.dispatch_of(key, num_requests=1)
        self._buffers.fill_padding(dispatch)
        self._decoder.cache = cache
        per_request = self.dispatcher.tokens_per_decode if key.is_uniform else None
        self._graphed.capture(
            dispatch, self._buffers.inputs(dispatch, tokens_per_request=per_request)
        )
        self.dispatcher.mark_captured(key)
        _log.info(
            "graph captured mode=%s num_tokens=%d took_s=%.3f",
            key.mode.value,
            key.num_tokens,
            time.perf_counter() - started,
        )

    def _tokens_per_request(self, plan: AttentionPlan) -> int | None:
        """Return how many tokens each request has, None if unequal or more than a decode has."""
        first = int(plan.num_queries[0])
        is_equal = bool((plan.num_queries == first).all())
        return first if is_equal and first <= self.dispatcher.tokens_per_decode else None

    def _run(self, dispatch: Dispatch, per_request: int | None) -> None:
        """Run a pass; in a full graph of mixed batches a uniform one counts as mixed."""
        key = dispatch.key
        if key is not None and key.mode is GraphMode.FULL and not key.is_uniform:
            per_request = None
        self._graphed.run(dispatch, self._buffers.inputs(dispatch, tokens_per_request=per_request))
