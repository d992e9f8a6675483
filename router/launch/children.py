"""The commands of a fleet's replicas and gateway: their settings files, arguments and probes.

Settings travel as JSON files of mode 0600, never as arguments, which every user can list. The
replica's Struct mirrors the worker's own by field name, because router may not import worker.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from kvindex.config import RedisConfig
from kvindex.foundation.tls import SYSTEM, Trust
from router.config import GatewaySpec
from router.launch.http_call import answers_ok
from router.launch.run_dir import RunDirectory, write_private
from router.launch.supervisor import ChildSpec

GATEWAY = "gateway"
# Beyond its own drain limit a process needs a moment to close what is open.
_DRAIN_MARGIN_S = 5.0


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's front process is started with; see worker/server/spec.py."""

    replica_id: str
    host: str
    port: int
    model_folder: str
    served_models: tuple[str, ...]
    dtype: str
    num_threads: int
    engine: dict[str, Any]
    kv_cache_memory_bytes: int | None = None
    internal_token: str | None = None
    fleet_secret: str | None = None
    index_url: str | None = None
    redis: RedisConfig = RedisConfig()
    advertised_url: str
    socket_dir: str | None = None
    renew_s: float
    lease_s: float
    drain_timeout_s: float
    api_key: str | None = None
    executor: str = "model"
    scripted: dict[str, Any] = {}
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    deterministic: bool = False
    distributed_executor_backend: str = "mp"
    runner_process: bool = False
    step_log_dir: str | None = None
    lora_adapters: dict[str, str] = {}
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    device: str = "auto"
    gpu_memory_utilization: float = 0.92
    cuda_graph_mode: str = "full_and_piecewise"
    enforce_eager: bool = False
    kv_events: dict[str, Any] = {}


def _host_in_url(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def url_of(host: str, port: int, *, tls: object = None) -> str:
    """Return the URL of a listener on this machine; `tls` is its setting, None for plain HTTP."""
    scheme = "http" if tls is None else "https"
    return f"{scheme}://{_host_in_url(host)}:{port}"


def replica_child(run_dir: RunDirectory, settings: ReplicaSettings) -> ChildSpec:
    """Describe one replica; writes its settings file."""
    name = settings.replica_id
    file = run_dir.spec_file(name)
    write_private(file, msgspec.json.encode(settings))
    return ChildSpec(
        name=name,
        argv=[sys.executable, "-P", "-m", "worker.server.main", "--config-json", str(file)],
        log_file=run_dir.log_file(name),
        probe=lambda: answers_ok(f"{settings.advertised_url}/health"),
        stop_timeout_s=settings.drain_timeout_s + _DRAIN_MARGIN_S,
        # Threads beyond a replica's share of the cores only slow its neighbours down.
        environ={"OMP_NUM_THREADS": str(settings.num_threads), "HF_HUB_OFFLINE": "1"},
    )


def gateway_child(run_dir: RunDirectory, spec: GatewaySpec) -> ChildSpec:
    """Describe the gateway; it is ready once it sees a replica. Writes its settings file."""
    file = run_dir.spec_file(GATEWAY)
    write_private(file, msgspec.json.encode(spec))
    router = spec.router
    # The admin listener opens last, and asks nobody for a certificate.
    url = url_of(router.admin_host, router.admin_port, tls=router.tls)
    trust = Trust(certificate=router.tls.certificate) if router.tls is not None else SYSTEM
    return ChildSpec(
        name=GATEWAY,
        argv=[sys.executable, "-P", "-m", "router.gateway", "--config-json", str(file)],
        log_file=run_dir.log_file(GATEWAY),
        probe=lambda: answers_ok(f"{url}/ready", trust=trust),
        stop_timeout_s=router.drain_timeout_s + _DRAIN_MARGIN_S,
    )
