"""The one end-to-end test of the default suite: a fleet starts, serves, explains itself, ends."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

from router.launch.down import is_alive
from tests.e2e.fleet_process import FleetProcess, scripted_config, tiny_folder, until

PROMPT = [token % 250 for token in range(200)]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_a_fleet_starts_serves_explains_itself_and_leaves_nothing(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    fleet = FleetProcess(tmp_path, scripted_config(model)).start()
    try:
        first = fleet.post("/v1/completions", BODY)
        second = fleet.post("/v1/completions", BODY)
        assert (first.status, second.status) == (200, 200), first.body
        assert first.body["choices"][0]["text"] == second.body["choices"][0]["text"]
        cached = [
            r.body["usage"]["prompt_tokens_details"]["cached_tokens"] for r in (first, second)
        ]
        assert cached == [0, 192]

        def is_foreseen() -> bool:
            again = fleet.post("/v1/completions", BODY)
            return again.headers["x-prefixfleet-cached-tokens-predicted"] == "192"

        until(is_foreseen, "all events of the first request in the index")
        explained = fleet.command("explain", second.headers["x-request-id"])
        assert "attempt 1: prefix_cost chose replica-" in explained.stdout, explained.stderr
        index = json.loads(fleet.command("index", "status", "--json").stdout)
        assert sorted(row["mode"] for row in index["targets"]) == ["EXACT", "EXACT"]
        assert fleet.command("status").returncode == 0
        assert stat.S_IMODE((fleet.run_dir / "fleet.json").stat().st_mode) == 0o600

        processes = fleet.processes()
        assert len(processes) == 7  # supervisor, Redis, gateway, 2 fronts, 2 engine cores
        assert fleet.stop(signal.SIGTERM) == 0
        assert not [pid for pid in processes if is_alive(pid)]
        assert not list(fleet.run_dir.rglob("*.sock"))
        assert (fleet.file.pid, fleet.file.ready) == (None, False)
    finally:
        fleet.kill()
