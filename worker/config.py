"""Settings of one replica: which model, in what precision, and where its front listens.

It is read before torch is imported, and knows nothing of scheduling (that is EngineConfig).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from engine.frontend.families import check_families
from kvindex.foundation.errors import ConfigError
from worker.gpu.config import Device, GpuConfig
from worker.gpu.dispatcher import CudaGraphMode

DType = Literal["auto", "float32", "bfloat16"]
DistributedBackend = Literal["mp", "ray"]
_LOOPBACK = "tcp://127.0.0.1:*"
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def _host_of(endpoint: str) -> tuple[str, bool]:
    """Return the host of an endpoint, and whether it is one."""
    address, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port == "*" or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    return address, endpoint.startswith("tcp://") and bool(colon and address) and is_port


class KvEventSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV events for routers of other make are published, in vLLM's words."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = _LOOPBACK
    replay_endpoint: str = _LOOPBACK
    topic: str = ""


class KvEventsConfig(KvEventSource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV events for routers of other make, under vLLM's names for these settings.

    They carry token ids and cache salts, so they are off by default and stay on this machine;
    `allow_remote` lets them out of it. `*` as a port takes a free one (GET /kv_event_sources tells
    which); of several engine cores each adds its rank to the ports.
    """

    allow_remote: bool = False

    def __post_init__(self) -> None:
        for field in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, field)
            host, is_endpoint = _host_of(endpoint)
            if not is_endpoint:
                raise ConfigError(
                    f"worker.kv_events.{field} is {endpoint!r}; expected tcp://HOST:PORT, "
                    "like tcp://127.0.0.1:5557"
                )
            if not self.allow_remote and host not in _LOOPBACK_HOSTS:
                raise ConfigError(
                    f"worker.kv_events.{field} is {endpoint}: whoever reaches it can read prompts "
                    "and cache salts; use tcp://127.0.0.1:PORT, or set allow_remote: true on a "
                    "network of the fleet's own"
                )

    def source(self, *, endpoint: str, replay_endpoint: str) -> KvEventSource:
        """Return what one engine core publishes, and where."""
        return KvEventSource(
            enable_kv_cache_events=self.enable_kv_cache_events,
            publisher=self.publisher,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            topic=self.topic,
        )


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of a replica, its memory, its listener and its life signs.

    `model` is "demo" or a Hugging Face folder. `dtype` "auto" is chosen by
    `worker.model.dtypes.resolve_dtype` from the CPU and the checkpoint. `num_threads` 0 uses all
    cores. `kv_cache_memory_bytes` None applies the rule of `worker.runner.memory`. `cache_dir`
    None is the user's cache directory. `data_parallel_size` engine cores, each with the whole model
    and a KV cache of its own, serve as one replica; memory and threads are those of each.
    `tensor_parallel_size` processes share the model of each core, its memory and its threads;
    `distributed_executor_backend` "ray" makes them actors of a Ray cluster.
    `runner_process` gives the model a process of its own, whose death costs cached blocks but no
    request. `deterministic` makes the tokens of a request the same alone and in any batch, in
    bfloat16 too. `step_log_dir` takes recordings of all steps, prompts included. `lora_adapters`
    maps names under which adapters are served to their folders. `tool_call_parser` and
    `reasoning_parser` name how the model writes calls and thinks; None is told by its template.
    `device` "auto" is a GPU if there is one; `gpu_memory_utilization` is the share of its memory
    that weights, activations, graphs and KV cache may take together; `enforce_eager` is
    `cuda_graph_mode` "none". `kv_events` are those for routers of other make.
    """

    model: str = "demo"
    served_model_name: str | None = None
    dtype: DType = "auto"
    num_threads: int = 0
    kv_cache_memory_bytes: int | None = None
    cache_dir: str | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    api_key: str | None = None
    lease_s: float = 10.0
    renew_s: float = 2.0
    drain_timeout_s: float = 30.0
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

    def __post_init__(self) -> None:
        check_families(
            tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser
        )
        GpuConfig(memory_utilization=self.gpu_memory_utilization)
        if self.num_threads < 0:
            raise ConfigError(
                f"worker.num_threads is {self.num_threads}; use 0 (all cores) or more"
            )
        if self.data_parallel_size < 1:
            raise ConfigError(
                f"worker.data_parallel_size is {self.data_parallel_size}; use 1 or more"
            )
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                f"worker.tensor_parallel_size is {self.tensor_parallel_size}; use 1 or more"
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes <= 0:
            raise ConfigError(
                f"worker.kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; use a positive "
                "number of bytes, or leave it out"
            )


def cache_directory(configured: str | None) -> Path:
    """Return where converted models are kept: as configured, else the user's cache directory."""
    if configured is not None:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "prefixfleet"
