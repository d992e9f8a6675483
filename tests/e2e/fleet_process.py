"""A whole fleet as a child process, for tests: started by the command line, found by fleet.json.

Replicas run the scripted executor with a tiny tokenizer unless told otherwise, so a fleet needs no
torch and is ready within seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from router.launch.down import is_alive, pids
from router.launch.fleet_file import FleetFile
from tests.engine.frontend.tiny_tokenizer import VOCAB_SIZE, write_model_folder

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0


def tiny_folder(folder: Path, *, max_model_len: int = 8192) -> Path:
    """Write a model folder for the scripted executor: tokenizer and lengths, no weights."""
    write_model_folder(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": max_model_len}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scripted_config(model: Path, **fleet: object) -> dict[str, Any]:
    """Return settings of a quick fleet of scripted replicas serving `tiny`."""
    scripted = {"num_blocks": 2048, "vocab_size": VOCAB_SIZE, "first_token": 32}
    return {
        "fleet": {"executor": "scripted", "scripted": scripted, **fleet},
        "worker": {
            "model": str(model),
            "served_model_name": "tiny",
            "port": random.randrange(20000, 30000),
            "renew_s": 0.5,
            "lease_s": 2.5,
        },
        "router": {"port": 0, "admin_port": 0, "poll_s": 0.2},
        "tenants": [{"name": "acme"}, {"name": "globex"}],
    }


class Reply(NamedTuple):
    """An HTTP answer: status, headers in lower case, JSON body (None when it is none)."""

    status: int
    headers: dict[str, str]
    body: Any


def http(
    url: str, *, key: str | None = None, body: object = None, raw: bytes | None = None
) -> Reply:
    """Call a URL: GET without a body, else POST; `raw` sends bytes as they are."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return _reply(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return _reply(error.code, error.headers, error.read())


def _reply(status: int, headers: Message, data: bytes) -> Reply:
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    return Reply(status, {name.lower(): value for name, value in headers.items()}, body)


def answers(url: str) -> bool:
    """Tell whether a URL answers a GET with 200, and somebody listens at all."""
    try:
        return http(url).status == 200
    except OSError:
        return False


def until(condition: Callable[[], bool], what: str, *, within_s: float = 20.0) -> None:
    """Wait until a condition holds; fail, saying what did not come, when it does not."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


class FleetProcess:
    """`prefixfleet up` in a run directory of its own."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = folder / "run"
        self.config_file = folder / "fleet.yaml"
        self.rewrite(config)
        self._arguments = arguments
        self._output = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None

    def rewrite(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration file."""
        self.config_file.write_text(json.dumps(config))  # JSON is YAML

    @property
    def config(self) -> dict[str, Any]:
        """What the configuration file says now."""
        config: dict[str, Any] = json.loads(self.config_file.read_text())
        return config

    def start(self) -> FleetProcess:
        """Start and wait for "ready"; fail with the output when it does not come."""
        self.launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no fleet:\n{self.output}\n{self._logs()}")
            time.sleep(0.02)
        return self

    def launch(self) -> None:
        """Start without waiting."""
        command = [sys.executable, "-m", "router.cli", "up", "-c", str(self.config_file)]
        command += ["--run-dir", str(self.run_dir), *self._arguments]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor."""
        assert self._process is not None, "not started"
        return self._process

    @property
    def output(self) -> str:
        """What `up` has printed."""
        return self._output.read_text()

    @property
    def file(self) -> FleetFile:
        """What fleet.json says now."""
        return msgspec.json.decode((self.run_dir / "fleet.json").read_bytes(), type=FleetFile)

    def key(self, tenant: str = "acme") -> str:
        """The API key of a tenant."""
        return self.file.keys[tenant]

    def post(self, path: str, body: object, *, tenant: str = "acme") -> Reply:
        """Send a request to the gateway."""
        return http(f"{self.file.url}{path}", key=self.key(tenant), body=body)

    def admin(self, path: str, *, body: object = None) -> Reply:
        """Call the admin API."""
        return http(f"{self.file.admin_url}{path}", key=self.file.admin_key, body=body)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command of the command line on this fleet."""
        return subprocess.run(
            [sys.executable, "-m", "router.cli", *words, "--run-dir", str(self.run_dir)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    def stop(self, sig: signal.Signals = signal.SIGINT, *, timeout_s: float = 60.0) -> int:
        """Signal the supervisor and wait for its end; return its exit code."""
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End it without mercy, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def processes(self) -> set[int]:
        """Every living process of the fleet, grandchildren included."""
        roots = {self.process.pid, *pids(self.file).values()}
        return {pid for pid in with_descendants(roots) if is_alive(pid)}

    def _is_ready(self) -> bool:
        """The file of a run that was killed says "ready" too, but names another supervisor."""
        if not (self.run_dir / "fleet.json").exists():
            return False
        file = self.file
        return file.ready and file.pid == self.process.pid

    def _logs(self) -> str:
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)


def with_descendants(roots: set[int]) -> set[int]:
    """Return these processes and all that they have started, directly or not."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
