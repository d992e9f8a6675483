"""The commands of a fleet's replicas and gateway: their settings files, arguments and probes.

Settings travel as JSON files of mode 0600, never as arguments, which every user can list. The
replica's Struct mirrors the worker's own by field name, because router may not import worker.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvindex.config import RedisConfig
from router.config import GatewaySpec, RouterConfig
from router.launch.http_call import answers_ok, socket_answers_ok
from router.launch.process_group import Inherited
from router.launch.run_dir import RunDirectory, write_private
from router.launch.supervisor import ChildSpec

if TYPE_CHECKING:
    from router.launch.gateway_seats import GatewaySeats

GATEWAY = "gateway"
# Beyond its own drain limit a process needs a moment to close what is open.
DRAIN_MARGIN_S = 5.0


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


def replica_argv(settings_file: str) -> list[str]:
    """Return the command of a replica that reads its settings from a file, - for standard input."""
    return [sys.executable, "-P", "-m", "worker.server.main", "--config-json", settings_file]


def replica_environ(settings: ReplicaSettings) -> dict[str, str]:
    """Return what a replica's environment has beyond that of whoever starts it."""
    # Threads beyond a replica's share of the cores only slow its neighbours down.
    return {"OMP_NUM_THREADS": str(settings.num_threads), "HF_HUB_OFFLINE": "1"}


def replica_child(run_dir: RunDirectory, settings: ReplicaSettings) -> ChildSpec:
    """Describe one replica; writes its settings file."""
    name = settings.replica_id
    file = run_dir.spec_file(name)
    write_private(file, msgspec.json.encode(settings))
    return ChildSpec(
        name=name,
        argv=replica_argv(str(file)),
        log_file=run_dir.log_file(name),
        probe=lambda: answers_ok(f"{settings.advertised_url}/health"),
        stop_timeout_s=settings.drain_timeout_s + DRAIN_MARGIN_S,
        environ=replica_environ(settings),
    )


def gateway_names(router: RouterConfig) -> list[str]:
    """Return what the processes of the gateway are called, in the order of their seats."""
    return [GATEWAY, *(f"{GATEWAY}-{number}" for number in range(1, router.processes))]


def write_gateway_spec(run_dir: RunDirectory, spec: GatewaySpec) -> Path:
    """Write the settings file that all processes of the gateway share."""
    file = run_dir.spec_file(GATEWAY)
    write_private(file, msgspec.json.encode(spec))
    return file


def gateway_child(
    run_dir: RunDirectory, spec: GatewaySpec, seats: GatewaySeats, number: int
) -> ChildSpec:
    """Describe the gateway process of one seat; it is ready once it sees a replica.

    Writes the settings file of the gateway.
    """
    from router.launch.gateway_seats import fds_of  # aiohttp, which a replica's start need not load

    name, file = gateway_names(spec.router)[number], write_gateway_spec(run_dir, spec)
    socket_file = seats.socket_file(number)
    before = _identity(socket_file)

    def hand_over() -> Inherited:
        seat = seats.seat(number)
        return Inherited(msgspec.json.encode(seat), fds_of(seat))

    def on_end(num_ends: int) -> None:
        if num_ends > 1:
            seats.give_up(number)

    return ChildSpec(
        name=name,
        argv=[sys.executable, "-P", "-m", "router.gateway", "--seat", "--config-json", str(file)],
        log_file=run_dir.log_file(name),
        # Its socket opens last; one that was there before is its predecessor's.
        probe=lambda: _identity(socket_file) != before and socket_answers_ok(socket_file, "/ready"),
        stop_timeout_s=spec.router.drain_timeout_s + DRAIN_MARGIN_S,
        retire_signal=signal.SIGUSR1,
        hand_over=hand_over,
        on_end=on_end,
    )


def _identity(file: Path) -> tuple[int, int] | None:
    """Return what differs between two files of one name, None when there is none."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns
