"""Mistakes in where replicas announce their KV events end the launcher with one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.fleet_process import scripted_config, tiny_folder


def refusal(*words: str) -> str:
    """Run a command that is refused and return the last line that it says."""
    command = [sys.executable, "-m", "router.cli", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr.splitlines()[-1]


def test_several_replicas_cannot_announce_on_one_port(tmp_path: Path) -> None:
    config: dict[str, Any] = scripted_config(tiny_folder(tmp_path / "tiny"), replicas=2)
    config["worker"]["kv_events"] = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:5557",
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(config))
    line = refusal("up", "-c", str(file), "--run-dir", str(tmp_path / "run"))
    assert "worker.kv_events.endpoint is one port for fleet.replicas=2" in line
    assert "write tcp://127.0.0.1:* and ask each replica's /kv_event_sources" in line


def test_a_flag_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    line = refusal("engine", str(tmp_path), "--kv-events-config", "[1]")
    assert "--kv-events-config: expected a JSON object, not '[1]'" in line
