"""How a fleet starts, refuses to start, ends, and starts again."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.launch.down import is_alive
from tests.e2e.fleet_process import FleetProcess, http, scripted_config, until

pytestmark = pytest.mark.slow


def prompt() -> dict[str, object]:
    return {"model": "tiny", "prompt": list(range(64)), "max_tokens": 2, "temperature": 0}


def one_replica(tiny_model: Path, **fleet: object) -> dict[str, Any]:
    return scripted_config(tiny_model, replicas=1, **fleet)


def test_ctrl_c_ends_everything_and_the_next_start_keeps_keys_and_secrets(
    tmp_path: Path, tiny_model: Path
) -> None:
    fleet = FleetProcess(tmp_path, one_replica(tiny_model)).start()
    try:
        first, processes = fleet.file, fleet.processes()
        assert fleet.stop(signal.SIGINT) == 130
        assert not [pid for pid in processes if is_alive(pid)]
        assert not list(fleet.run_dir.rglob("*.sock"))
        fleet.start()
        assert fleet.file.keys == first.keys
        assert fleet.file.admin_key == first.admin_key
        assert http(f"{fleet.file.url}/v1/models", key=first.keys["globex"]).status == 200
        assert fleet.command("down").returncode == 0
        assert fleet.process.wait(5) == 0
    finally:
        fleet.kill()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGHUP])
def test_no_kind_of_end_of_the_supervisor_leaves_an_orphan(
    sig: signal.Signals, tmp_path: Path, tiny_model: Path
) -> None:
    fleet = FleetProcess(tmp_path, one_replica(tiny_model)).start()
    processes = fleet.processes()
    assert len(processes) == 5
    fleet.process.send_signal(sig)
    fleet.process.wait(30)
    until(lambda: not any(is_alive(pid) for pid in processes), "no process is left")
    again = FleetProcess(tmp_path, one_replica(tiny_model)).start()
    assert again.stop() == 130


def test_a_second_ctrl_c_does_not_wait_for_a_stream(tmp_path: Path, tiny_model: Path) -> None:
    config = one_replica(tiny_model)
    config["fleet"]["scripted"]["cost"] = {"base_s": 0.2}
    fleet = FleetProcess(tmp_path, config).start()
    body = json.dumps({**prompt(), "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
    address = urlsplit(fleet.file.url)
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: f\r\nAuthorization: Bearer {fleet.key()}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert b"200" in connection.recv(4096)
        processes = fleet.processes()
        fleet.process.send_signal(signal.SIGINT)
        until(lambda: "SIGINT: draining" in fleet.output, "the drain begins")
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(10) == 130
    assert not [pid for pid in processes if is_alive(pid)]


def test_a_second_fleet_in_one_run_directory_is_refused(fleet: FleetProcess) -> None:
    words = ("up", "-c", str(fleet.config_file), "--port", "0", "--admin-port", "0")
    refused = fleet.command(*words)
    assert refused.returncode == 3
    assert (
        f"already runs in {fleet.run_dir} (pid {fleet.process.pid}); stop it with" in refused.stderr
    )
    assert fleet.file.ready


def kill_replica(fleet: FleetProcess) -> None:
    until(lambda: fleet.file.replicas[0].pid is not None, "the replica runs")
    pid = fleet.file.replicas[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: fleet.file.replicas[0].pid != pid, "its end is noticed")


def test_a_replica_that_would_not_stay_up_ends_the_fleet_with_code_4(
    tmp_path: Path, tiny_model: Path
) -> None:
    fleet = FleetProcess(
        tmp_path, one_replica(tiny_model, restart_budget=1, backoff_initial_s=0.01)
    ).start()
    processes = fleet.processes()
    kill_replica(fleet)
    kill_replica(fleet)
    assert fleet.process.wait(30) == 4
    assert "replica-0 was killed by SIGKILL and has used up its 1 restarts" in fleet.output
    assert not [pid for pid in processes if is_alive(pid)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--redis", "redis://127.0.0.1:1/0"), 3, "Redis at redis://127.0.0.1:1/0: "),
        (("--redis", "localhost"), 2, "redis: index_url must be `embedded`, or begin with one of"),
        (("--model", "/nowhere/model"), 2, "/nowhere/model: no tokenizer.json"),
        (("--executor", "model", "--model", "/nowhere/model"), 3, "/nowhere/model"),
    ],
)
def test_what_is_missing_is_one_line_and_nothing_keeps_running(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, tiny_model: Path
) -> None:
    fleet = FleetProcess(tmp_path, one_replica(tiny_model), *arguments)
    fleet.launch()
    assert fleet.process.wait(60) == code
    last = fleet.output.splitlines()[-1]
    assert last.startswith("prefixfleet: ")
    assert message in last
    assert not list(fleet.run_dir.rglob("*.sock"))
    assert not (fleet.run_dir / "fleet.json").exists()
