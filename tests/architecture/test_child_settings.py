"""What the launcher writes for a child is what the child reads; they share no code."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from router.launch.children import ReplicaSettings
from worker.config import KvEventsConfig
from worker.server.spec import ReplicaSpec


def test_a_replicas_settings_are_read_as_they_were_written() -> None:
    settings = ReplicaSettings(
        replica_id="replica-0",
        host="127.0.0.1",
        port=8100,
        model_folder="/model",
        served_models=("m",),
        dtype="float32",
        num_threads=1,
        engine=msgspec.to_builtins(EngineConfig(block_size=32)),
        kv_cache_memory_bytes=1 << 20,
        internal_token="token",
        fleet_secret="secret",
        index_url="redis://127.0.0.1:6379/0",
        advertised_url="http://127.0.0.1:8100",
        socket_dir="/run/r0",
        renew_s=1.0,
        lease_s=5.0,
        drain_timeout_s=30.0,
        executor="scripted",
        scripted={"num_blocks": 64},
        kv_events=msgspec.to_builtins(KvEventsConfig(enable_kv_cache_events=True, topic="kv")),
    )
    spec = msgspec.json.decode(msgspec.json.encode(settings), type=ReplicaSpec)
    for field in ReplicaSettings.__struct_fields__:
        read = msgspec.to_builtins(getattr(spec, field))
        written = msgspec.to_builtins(getattr(settings, field))
        if field == "scripted":
            assert read["num_blocks"] == 64
        else:
            assert read == written, field
