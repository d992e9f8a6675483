"""Starts the engine core of a replica, or its cores, from its spec.

It translates what the replica was told into what the core is told, and knows neither HTTP nor
the index.
"""

from __future__ import annotations

from pathlib import Path

from engine.frontend.encoder import Encoder
from worker.config import KvEventsConfig, cache_directory
from worker.core.client import EngineClient
from worker.core.data_parallel import DataParallelClient
from worker.core.process_client import ProcessClient
from worker.core.spec import Announcement, CoreSpec, ScriptedModel
from worker.gpu.config import GpuConfig
from worker.server.spec import ReplicaSpec


async def start_engine(spec: ReplicaSpec, encoder: Encoder, socket_dir: Path) -> EngineClient:
    """Start every core and wait until they can serve; raises DependencyError when one cannot."""
    size = spec.data_parallel_size
    if size == 1:
        return await ProcessClient.start(core_spec(spec, encoder), socket_dir=socket_dir)

    async def start_core(rank: int) -> EngineClient:
        return await ProcessClient.start(
            core_spec(spec, encoder, dp_rank=rank), socket_dir=socket_dir / f"rank{rank}"
        )

    return await DataParallelClient.start(
        size, start_core, max_step_tokens=spec.engine.max_num_batched_tokens
    )


def core_spec(spec: ReplicaSpec, encoder: Encoder, *, dp_rank: int = 0) -> CoreSpec:
    """Build a core's spec; events are published only when there is somebody to tell."""
    scripted = None
    if spec.executor == "scripted":
        scripted = spec.scripted or ScriptedModel.sized(
            vocab_size=encoder.vocab_size, max_model_len=encoder.max_model_len
        )
    step_log = None
    if spec.step_log_dir is not None:
        step_log = str(Path(spec.step_log_dir) / f"{spec.replica_id}-{dp_rank}.steps")
    return CoreSpec(
        replica_id=spec.replica_id,
        engine=spec.engine,
        dp_rank=dp_rank,
        scripted=scripted,
        model_folder=spec.model_folder,
        dtype=spec.dtype,
        num_threads=spec.num_threads,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        publish_events=spec.in_fleet,
        announce=_announcement(spec.kv_events, dp_rank),
        runner_process=spec.runner_process,
        tensor_parallel_size=spec.tensor_parallel_size,
        deterministic=spec.deterministic,
        distributed_executor_backend=spec.distributed_executor_backend,
        step_log=step_log,
        gpu=GpuConfig(
            device=spec.device,
            memory_utilization=spec.gpu_memory_utilization,
            graph_mode=spec.cuda_graph_mode,
            enforce_eager=spec.enforce_eager,
            profile_dir=str(cache_directory(None) / "gpu-profiles"),
        ),
    )


def _announcement(config: KvEventsConfig, dp_rank: int) -> Announcement | None:
    """Return where a core announces what it caches; as at vLLM, each adds its rank to the ports."""
    if not config.enable_kv_cache_events:
        return None
    return Announcement(
        endpoint=_of_rank(config.endpoint, dp_rank),
        replay_endpoint=_of_rank(config.replay_endpoint, dp_rank),
        topic=config.topic,
    )


def _of_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return endpoint if port == "*" else f"{address}:{int(port) + rank}"
