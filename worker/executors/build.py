"""Builds the executor that a core's spec asks for; the only place that leads to torch."""

from __future__ import annotations

import os
import time

from engine.executor import Executor
from engine.scripted_executor import ScriptedExecutor
from worker.core.spec import CoreSpec


def build_executor(spec: CoreSpec) -> Executor:
    """Build an executor in this process, or one that has a process of its own.

    Raises DependencyError or ConfigError when the model cannot be served.
    """
    if spec.runner_process:
        from worker.executors.process import ProcessExecutor

        return ProcessExecutor(spec)
    return build_local_executor(spec)


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
        )
    # Read when torch is loaded. Threads that wait for each other spin for a moment, then sleep:
    # spinning for long starves a shared machine, never spinning halves the speed of a decode step.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from worker.executors.uniproc import UniprocExecutor

    assert spec.model_folder is not None, "neither a model folder nor a scripted model"
    return UniprocExecutor(
        spec.model_folder,
        dtype=spec.dtype,
        engine_config=spec.engine,
        num_threads=spec.num_threads,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        num_blocks=spec.num_blocks,
    )
