"""What a replica is told at its start; written by the launcher or the command line, read once.

It is read before anything heavy is imported. Secrets travel in it, so its file is private.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.frontend.families import check_families
from kvindex.config import RedisConfig
from kvindex.foundation.errors import ConfigError
from worker.config import DistributedBackend, KvEventsConfig
from worker.core.spec import ScriptedModel
from worker.gpu.config import Device
from worker.gpu.dispatcher import CudaGraphMode

DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica: what it serves, where it listens, whom it trusts and where it registers.

    `index_url` None means on its own: no index, no registry, and a token is optional; of `redis`
    only the time-outs matter. In a fleet `internal_token` and `fleet_secret` are required.
    `api_key` is for replicas on their own.
    `model_name` is the model's name in the fleet's identity (default: the first served name).
    `executor` "scripted" needs only the tokenizer files of `model_folder`; `scripted` sizes it (by
    default: as large as the model says). `socket_dir` None takes a new temporary folder.
    `advertised_url` is what the registry tells gateways, `http://host:port` unless given.
    `data_parallel_size` cores serve as one replica; `num_threads` and `kv_cache_memory_bytes` are
    those of each. `tensor_parallel_size`, `deterministic`, `runner_process`,
    `distributed_executor_backend`, `step_log_dir`, `lora_adapters`, `tool_call_parser` and
    `reasoning_parser`: see WorkerConfig. `kv_events`: see KvEventsConfig.
    """

    replica_id: str
    port: int
    model_folder: str
    served_models: tuple[str, ...]
    host: str = "127.0.0.1"
    model_name: str | None = None
    dtype: str = "auto"
    num_threads: int = 0
    engine: EngineConfig = EngineConfig()
    kv_cache_memory_bytes: int | None = None
    executor: Literal["model", "scripted"] = "model"
    scripted: ScriptedModel | None = None
    internal_token: str | None = None
    fleet_secret: str | None = None
    api_key: str | None = None
    index_url: str | None = None
    redis: RedisConfig = RedisConfig()
    advertised_url: str | None = None
    socket_dir: str | None = None
    renew_s: float = 2.0
    lease_s: float = 10.0
    drain_timeout_s: float = 30.0
    keep_alive_s: float = 5.0
    write_timeout_s: float = 60.0
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    num_encode_threads: int = 2
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    deterministic: bool = False
    distributed_executor_backend: DistributedBackend = "mp"
    runner_process: bool = False
    step_log_dir: str | None = None
    lora_adapters: dict[str, str] = {}
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    device: Device = "auto"
    gpu_memory_utilization: float = 0.92
    cuda_graph_mode: CudaGraphMode = "full_and_piecewise"
    enforce_eager: bool = False
    kv_events: KvEventsConfig = KvEventsConfig()

    @property
    def in_fleet(self) -> bool:
        """Tell whether this replica registers in an index."""
        return self.index_url is not None

    def __post_init__(self) -> None:
        check_families(
            tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser
        )
        if not self.served_models:
            raise ConfigError("served_models is empty; name at least one model")
        if self.in_fleet and not (self.internal_token and self.fleet_secret):
            raise ConfigError("index_url is set, so internal_token and fleet_secret are needed too")
        if self.data_parallel_size < 1:
            raise ConfigError(f"data_parallel_size={self.data_parallel_size} must be 1 or more")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size={self.tensor_parallel_size} must be 1 or more")
        if self.tensor_parallel_size > 1 and self.lora_adapters:
            raise ConfigError("LoRA adapters need tensor_parallel_size=1: ranks do not split them")
        if self.renew_s <= 0 or self.lease_s <= self.renew_s:
            raise ConfigError(f"lease_s={self.lease_s} must exceed renew_s={self.renew_s} > 0")


def read_spec(source: str) -> ReplicaSpec:
    """Read a spec from a JSON file, "-" for standard input; raise ConfigError saying where."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
    try:
        return msgspec.json.decode(raw, type=ReplicaSpec)
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{source}: {error}") from None
