"""Loads a model onto a GPU and sizes its KV cache by what is left there.

The first start measures; later ones trust what was kept, and check it while nothing else is to do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from worker.gpu.background import BackgroundWork
from worker.gpu.block_memory import GpuBlockMemory
from worker.gpu.config import GpuConfig
from worker.gpu.decoder import GpuDecoder, check_supported
from worker.gpu.device import GpuDevice, MemoryUse
from worker.gpu.dispatcher import GraphDispatcher, capture_sizes
from worker.gpu.memory import MemoryProfile, check_free, is_outdated, kv_cache_bytes
from worker.gpu.model import GpuModel
from worker.gpu.profile_store import ProfileKey, ProfileStore
from worker.gpu.profiling import Profiler
from worker.gpu.step_buffers import StepBuffers
from worker.model.config import ModelConfig
from worker.model.dtypes import dtype_name
from worker.model.load_decoder import load_weights
from worker.model.shard import shard_of
from worker.model.weights import weights_digest
from worker.runner.memory import KVCachePlan, plan_kv_cache

_log = logging.getLogger("prefixfleet.worker.gpu")


@dataclass(slots=True, frozen=True)
class LoadedGpuModel:
    """A model on the device with its cache, and what is to be done beside serving.

    `weights_digest` is that of worker.model.weights; reading it takes as long as loading does.
    """

    model: GpuModel
    memory: GpuBlockMemory
    plan: KVCachePlan
    background: BackgroundWork
    weights_digest: str


@dataclass(slots=True, frozen=True)
class GpuLoader:
    """What is to be loaded, and where to; `gpu.device` has been settled."""

    folder: Path
    config: ModelConfig
    dtype: torch.dtype
    engine: EngineConfig
    gpu: GpuConfig
    device: GpuDevice

    def load(
        self, *, kv_cache_memory_bytes: int | None = None, num_blocks: int | None = None
    ) -> LoadedGpuModel:
        """Load; `num_blocks` overrides `kv_cache_memory_bytes`, which overrides measuring.

        Raises ConfigError when the model is not supported there or does not fit, DependencyError
        when the folder is at fault.
        """
        check_supported(self.config)
        before = self.device.memory()
        kv_bytes = kv_cache_memory_bytes or 0
        is_measured = num_blocks is None and kv_cache_memory_bytes is None
        if is_measured:
            total, share = self.device.total_bytes, self.gpu.memory_utilization
            check_free(total=total, free=before.free, utilization=share)
        decoder, buffers, dispatcher = self._decoder(), self._buffers(), self._dispatcher()
        profiler = self._profiler(decoder, buffers, before)
        digest = weights_digest(self.folder)
        sizing = _Sizing(self, profiler, digest)
        if is_measured:
            kv_bytes = sizing.kv_bytes(self._dispatcher)
        plan = self._plan(kv_bytes, num_blocks)
        memory = self._memory(plan)
        profiler.run_largest_step(memory.cache)
        model = GpuModel(decoder, buffers, dispatcher, self.device.graph_backend())
        background = BackgroundWork(
            dispatcher,
            lambda key: model.capture(key, memory.cache),
            [lambda: sizing.check(memory)] if sizing.was_kept else [],
        )
        return LoadedGpuModel(model, memory, plan, background, digest)

    @property
    def max_positions(self) -> int:
        """The longest sequence, as far as memory allows it."""
        limit = self.engine.max_model_len or self.config.max_position
        return min(self.config.max_position, limit)

    def profile_key(self, model_digest: str) -> ProfileKey:
        """Return what the memory profile depends on."""
        return ProfileKey(
            model_digest=model_digest,
            device_name=self.device.name,
            total_bytes=self.device.total_bytes,
            dtype=dtype_name(self.dtype),
            max_num_batched_tokens=self.engine.max_num_batched_tokens,
            max_num_seqs=self.engine.max_num_seqs,
            max_model_len=self.max_positions,
            graph_mode=self.gpu.effective_graph_mode,
            software=f"torch {torch.__version__}",
        )

    @property
    def _block_shape(self) -> tuple[int, int, int]:
        return self.engine.block_size, self.config.num_kv_heads, self.config.head_dim

    def _decoder(self) -> GpuDecoder:
        whole = shard_of(self.config, rank=0, size=1)
        return GpuDecoder(
            self.config,
            load_weights(self.folder, self.config, whole, dtype=self.dtype),
            max_tokens=self.engine.max_num_batched_tokens,
            num_positions=self.max_positions,
            num_processors=self.device.num_processors,
            device=self.device.torch_device,
        )

    def _buffers(self) -> StepBuffers:
        return StepBuffers(
            max_tokens=self.engine.max_num_batched_tokens,
            max_num_seqs=self.engine.max_num_seqs,
            max_blocks=-(-self.max_positions // self.engine.block_size),
            device=self.device.torch_device,
        )

    def _dispatcher(self) -> GraphDispatcher:
        speculation, max_num_seqs = self.engine.speculation, self.engine.max_num_seqs
        drafts = 0 if speculation.method == "none" else speculation.num_draft_tokens
        sizes = capture_sizes(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.engine.max_num_batched_tokens,
            tokens_per_decode=1 + drafts,
        )
        return GraphDispatcher(
            self.gpu.effective_graph_mode,
            sizes,
            max_num_seqs=max_num_seqs,
            tokens_per_decode=1 + drafts,
        )

    def _profiler(self, decoder: GpuDecoder, buffers: StepBuffers, before: MemoryUse) -> Profiler:
        return Profiler(
            self.device,
            decoder,
            buffers,
            before=before,
            max_tokens=self.engine.max_num_batched_tokens,
            max_num_seqs=self.engine.max_num_seqs,
            block_size=self.engine.block_size,
        )

    def _plan(self, kv_bytes: int, num_blocks: int | None) -> KVCachePlan:
        elements = 2 * self.config.num_layers * math.prod(self._block_shape)
        return plan_kv_cache(
            kv_bytes=kv_bytes,
            bytes_per_block=elements * self.dtype.itemsize,
            block_size=self.engine.block_size,
            num_blocks=num_blocks,
            model_limit=self.config.max_position,
            configured_limit=self.engine.max_model_len,
        )

    def _memory(self, plan: KVCachePlan) -> GpuBlockMemory:
        return GpuBlockMemory(
            num_layers=self.config.num_layers,
            num_blocks=plan.num_blocks,
            num_host_blocks=self.engine.num_host_blocks,
            block_shape=self._block_shape,
            dtype=self.dtype,
            device=self.device.torch_device,
            wait=self.device.memory,
        )


class _Sizing:
    """What is left for the KV cache, by a kept profile or a new one."""

    def __init__(self, loader: GpuLoader, profiler: Profiler, model_digest: str) -> None:
        folder = loader.gpu.profile_dir
        self._loader = loader
        self._profiler = profiler
        self._store = ProfileStore(None if folder is None else Path(folder))
        self._key = loader.profile_key(model_digest)
        self._kept: MemoryProfile | None = None

    @property
    def was_kept(self) -> bool:
        """Whether the size rests on what an earlier start measured."""
        return self._kept is not None

    def kv_bytes(self, new_dispatcher: Callable[[], GraphDispatcher]) -> int:
        """Return the bytes for the KV cache; ConfigError when nothing is left."""
        self._kept = profile = self._store.get(self._key)
        if profile is None:
            profile = self._profiler.measure(new_dispatcher)
            self._store.put(self._key, profile)
        _log.info("memory profile was_kept=%s %s", self.was_kept, profile)
        return kv_cache_bytes(
            profile,
            total=self._loader.device.total_bytes,
            utilization=self._loader.gpu.memory_utilization,
            num_graphs=len(new_dispatcher().all_keys()),
        )

    def check(self, memory: GpuBlockMemory) -> None:
        """Measure again beside the cache; what turns out to be too little is not kept."""
        assert self._kept is not None
        measured = self._profiler.measure_steps(memory.cache)
        if is_outdated(self._kept, measured):
            self._store.forget(self._key)
            _log.warning("memory profile outdated kept=%s measured=%s", self._kept, measured)
