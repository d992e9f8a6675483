"""Starts the engine core of a replica, or its cores, from its spec.

It translates what the replica was told into what the core is told, and knows neither HTTP nor
the index. Little is imported for it: a start begins before what serves the engine is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from worker.config import KvEventsConfig, KvEventSource, cache_directory
from worker.core.client import EngineClient
from worker.core.data_parallel import DataParallelClient
from worker.core.process_client import ProcessClient
from worker.core.spec import CoreSpec, ScriptedModel
from worker.gpu.config import GpuConfig
from worker.server.spec import ReplicaSpec

if TYPE_CHECKING:
    from engine.frontend.encoder import Encoder


class EngineStart:
    """An engine on its way up from the moment that this is made, in an event loop, until `close`.

    `encoder` is the caller's to fill in: a scripted model is as large as the tokenizer says.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.began_at = time.monotonic()
        self.encoder: asyncio.Future[Encoder] = asyncio.get_running_loop().create_future()
        self._folder = contextlib.ExitStack()
        socket_dir = self._folder.enter_context(_socket_dir(spec))
        self._task = asyncio.create_task(
            start_engine(spec, self.encoder, socket_dir), name="engine-start"
        )

    async def client(self) -> EngineClient:
        """Wait until every core can serve; raises DependencyError when one cannot."""
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """End the engine, however far it came. Idempotent."""
        self._task.cancel()
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.close()
        self._folder.close()


@contextlib.contextmanager
def _socket_dir(spec: ReplicaSpec) -> Iterator[Path]:
    """Give the folder of this replica's local sockets; a temporary one goes away afterwards."""
    if spec.socket_dir is not None:
        yield Path(spec.socket_dir)
        return
    folder = Path(tempfile.mkdtemp(prefix="prefixfleet-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def start_engine(
    spec: ReplicaSpec, encoder: Awaitable[Encoder], socket_dir: Path
) -> EngineClient:
    """Start every core and wait until they can serve; raises DependencyError when one cannot.

    Only a scripted model, which is as large as the tokenizer says, waits for the encoder.
    """
    scripted = scripted_model(spec, await encoder) if spec.executor == "scripted" else None
    size = spec.data_parallel_size
    if size == 1:
        return await ProcessClient.start(core_spec(spec, scripted), socket_dir=socket_dir)

    async def start_core(rank: int) -> EngineClient:
        return await ProcessClient.start(
            core_spec(spec, scripted, dp_rank=rank), socket_dir=socket_dir / f"rank{rank}"
        )

    return await DataParallelClient.start(
        size, start_core, max_step_tokens=spec.engine.max_num_batched_tokens
    )


def scripted_model(spec: ReplicaSpec, encoder: Encoder) -> ScriptedModel:
    """Return the scripted model of a spec; by default as large as the tokenizer's files say."""
    return spec.scripted or ScriptedModel.sized(
        vocab_size=encoder.vocab_size, max_model_len=encoder.max_model_len
    )


def core_spec(
    spec: ReplicaSpec, scripted: ScriptedModel | None = None, *, dp_rank: int = 0
) -> CoreSpec:
    """Build a core's spec; events are published only when there is somebody to tell."""
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


def _announcement(config: KvEventsConfig, dp_rank: int) -> KvEventSource | None:
    """Return where a core announces what it caches; as at vLLM, each adds its rank to the ports."""
    if not config.enable_kv_cache_events:
        return None
    return config.source(
        endpoint=_of_rank(config.endpoint, dp_rank),
        replay_endpoint=_of_rank(config.replay_endpoint, dp_rank),
    )


def _of_rank(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return endpoint if port == "*" else f"{address}:{int(port) + rank}"
