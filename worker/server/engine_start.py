"""Starts the engine-core process of a replica from its spec.

It translates what the replica was told into what the core is told, and knows neither HTTP nor
the index.
"""

from __future__ import annotations

from pathlib import Path

from engine.frontend.encoder import Encoder
from worker.core.process_client import ProcessClient
from worker.core.spec import CoreSpec, ScriptedModel
from worker.server.spec import ReplicaSpec

_SCRIPTED_MODEL_LEN = 8192


async def start_engine(spec: ReplicaSpec, encoder: Encoder, socket_dir: Path) -> ProcessClient:
    """Start the core and wait until it can serve; raises DependencyError when it cannot."""
    return await ProcessClient.start(core_spec(spec, encoder), socket_dir=socket_dir)


def core_spec(spec: ReplicaSpec, encoder: Encoder) -> CoreSpec:
    """Build the core's spec; events are published only when there is an index to tell."""
    scripted = None
    if spec.executor == "scripted":
        scripted = spec.scripted or ScriptedModel(
            vocab_size=encoder.vocab_size,
            max_model_len=encoder.max_model_len or _SCRIPTED_MODEL_LEN,
        )
    return CoreSpec(
        replica_id=spec.replica_id,
        engine=spec.engine,
        scripted=scripted,
        model_folder=spec.model_folder,
        dtype=spec.dtype,
        num_threads=spec.num_threads,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        publish_events=spec.in_fleet,
    )
