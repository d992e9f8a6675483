"""What an engine-core process is told at its start; written by the front, read once."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.scripted_executor import StepCost
from worker.config import DistributedBackend, KvEventSource
from worker.gpu.config import GpuConfig


class ScriptedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model-free executor: how large it pretends to be and what a step costs."""

    num_blocks: int = 4096
    vocab_size: int = 256
    first_token: int = 0
    max_model_len: int = 8192
    cost: StepCost = StepCost()

    @staticmethod
    def sized(*, vocab_size: int, max_model_len: int | None) -> ScriptedModel:
        """Return one as large as a real model; None is for a length that its files do not say."""
        if max_model_len is None:
            return ScriptedModel(vocab_size=vocab_size)
        return ScriptedModel(vocab_size=vocab_size, max_model_len=max_model_len)


class TensorParallelRank(msgspec.Struct, frozen=True):
    """One of `size` processes that share a model; they find each other at a URL."""

    rank: int
    size: int
    rendezvous: str


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the engine-core process needs.

    `input_endpoint` and `output_endpoint` are bound and filled in by the front; KV events go out on
    `events_endpoint` (`:*` takes a free port), in loopback's reach by default. `scripted` replaces
    the model when set; otherwise `model_folder` is loaded. `num_threads` 0 uses every core.
    `dp_rank` says which of a replica's cores this one is. `num_blocks` overrides what memory
    allows. `runner_process`: the model has a process of its own, whose death costs what is cached
    but no request. `tensor_parallel_size` processes share the model, its KV cache and what memory
    and threads are given: children of the core, or actors of a Ray cluster, as
    `distributed_executor_backend` says; `tensor_parallel_rank` is set for each of them alone.
    `deterministic`: a row is computed the same alone and in any batch.
    `step_log` is a file for a recording of every step, prompts included. `announce`: where events
    are told to routers of other make, token ids and cache salts included.
    """

    replica_id: str
    engine: EngineConfig
    dp_rank: int = 0
    input_endpoint: str = ""
    output_endpoint: str = ""
    scripted: ScriptedModel | None = None
    model_folder: str | None = None
    dtype: str = "auto"
    num_threads: int = 0
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    runner_process: bool = False
    tensor_parallel_size: int = 1
    deterministic: bool = False
    distributed_executor_backend: DistributedBackend = "mp"
    tensor_parallel_rank: TensorParallelRank | None = None
    step_log: str | None = None
    gpu: GpuConfig = GpuConfig(device="cpu")
    publish_events: bool = True
    announce: KvEventSource | None = None
    events_endpoint: str = "tcp://127.0.0.1:*"
    replay_endpoint: str = "tcp://127.0.0.1:*"
    heartbeat_s: float = 0.5
