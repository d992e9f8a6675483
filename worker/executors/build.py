"""Builds the executor that a core's spec asks for; the only place that leads to torch."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from engine.executor import Executor
from engine.grammar import GrammarBackend
from engine.scripted_executor import ScriptedExecutor
from kvindex.foundation.errors import ConfigError
from worker.core.spec import CoreSpec
from worker.executors.reloading import ReloadingExecutor

if TYPE_CHECKING:
    from worker.model.parallel import RankGroup


def build_executor(spec: CoreSpec) -> Executor:
    """Build an executor in this process, or one that has a process of its own.

    Raises DependencyError or ConfigError when the model cannot be served.
    """
    if spec.tensor_parallel_size > 1 and spec.scripted is None:
        from worker.model.config import read_model_config
        from worker.model.shard import check_parallel_size

        assert spec.model_folder is not None, "neither a model folder nor a scripted model"
        check_parallel_size(read_model_config(Path(spec.model_folder)), spec.tensor_parallel_size)
    is_apart = spec.runner_process or spec.distributed_executor_backend == "ray"
    if is_apart or spec.tensor_parallel_size > 1:
        from worker.executors.process import ProcessExecutor

        if spec.distributed_executor_backend == "mp":
            return ReloadingExecutor(spec, ProcessExecutor)
        from worker.executors.ray_ranks import RayRanks

        return ReloadingExecutor(spec, partial(ProcessExecutor, launch=RayRanks))
    if spec.scripted is not None:
        return build_local_executor(spec)
    return ReloadingExecutor(spec, build_local_executor)


def build_local_executor(spec: CoreSpec) -> Executor:
    """Build an executor in this process."""
    if spec.scripted is not None:
        scripted = spec.scripted
        return ScriptedExecutor(
            num_blocks=scripted.num_blocks,
            block_size=spec.engine.block_size,
            vocab_size=scripted.vocab_size,
            max_model_len=scripted.max_model_len,
            first_token=scripted.first_token,
            cost=scripted.cost,
            sleep=time.sleep,
            grammars=_grammars(spec, scripted.vocab_size),
        )
    # Read when torch is loaded, so it comes before whatever leads to torch. Threads that wait for
    # each other spin for a moment, then sleep: spinning for long starves a shared machine, never
    # spinning halves the speed of a decode step.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    executor = _gpu_executor(spec)
    if executor is not None:
        return executor
    from worker.executors.uniproc import UniprocExecutor

    assert spec.model_folder is not None, "neither a model folder nor a scripted model"
    return UniprocExecutor(
        spec.model_folder,
        dtype=spec.dtype,
        engine_config=spec.engine,
        num_threads=spec.num_threads,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        num_blocks=spec.num_blocks,
        ranks=_ranks(spec),
        deterministic=spec.deterministic,
    )


def _gpu_executor(spec: CoreSpec) -> Executor | None:
    """Build an executor on the GPU that the spec asks for, None where there is none."""
    from worker.gpu.device import find_gpu

    only_on_cpu = {
        "deterministic": spec.deterministic,
        "tensor_parallel_size > 1": spec.tensor_parallel_rank is not None,
    }
    for name, is_asked in only_on_cpu.items():
        if is_asked and spec.gpu.device == "cuda":
            raise ConfigError(f"{name} does not run on a GPU yet; set worker.device to cpu")
    if any(only_on_cpu.values()):
        return None
    device = find_gpu(spec.gpu)
    if device is None:
        return None
    from worker.gpu.executor import GpuExecutor

    assert spec.model_folder is not None, "neither a model folder nor a scripted model"
    return GpuExecutor(
        spec.model_folder,
        dtype=spec.dtype,
        engine_config=spec.engine,
        gpu=spec.gpu,
        device=device,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        num_blocks=spec.num_blocks,
    )


def _ranks(spec: CoreSpec) -> RankGroup:
    """Meet the other ranks, if this process is one of several."""
    import torch

    from worker.model.parallel import ALONE, DistributedRanks
    from worker.model.shared_ranks import SharedMemoryRanks, can_share_memory

    place = spec.tensor_parallel_rank
    if place is None:
        return ALONE
    url = urlsplit(place.rendezvous)
    if url.scheme == "file" and can_share_memory():
        return SharedMemoryRanks(place.rank, place.size, rendezvous=Path(url.path))
    return DistributedRanks(
        place.rank, place.size, rendezvous=place.rendezvous, device=torch.device("cpu")
    )


def _grammars(spec: CoreSpec, vocab_size: int) -> GrammarBackend | None:
    """Serve grammars over the model folder's tokenizer, if a scripted model has one."""
    if spec.model_folder is None:
        return None
    from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend

    folder = Path(spec.model_folder)
    return LlguidanceBackend(lambda: GrammarTokenizer.read(folder), vocab_size=vocab_size)
