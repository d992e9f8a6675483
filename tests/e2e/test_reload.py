"""`prefixfleet reload` under traffic: what must restart does, one by one, and no stream notices."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.launch.down import is_alive
from tests.e2e.fleet_process import FleetProcess, scripted_config, until

pytestmark = pytest.mark.slow

NUM_PROMPTS = 6
STEP_S = 0.02
NUM_TOKENS = 100
"""A stream lasts two seconds, four times as long as a replica that is told to end waits for it."""


def reloadable(tiny_model: Path, **fleet: Any) -> dict[str, Any]:
    config = scripted_config(tiny_model, **fleet)
    config["fleet"]["scripted"]["cost"] = {"base_s": STEP_S}
    config["worker"]["drain_timeout_s"] = 0.5
    config["router"]["default_policy"] = "round_robin"  # Every replica has streams to lose.
    return config


def body(prompt: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": [(7 * prompt + 11 * i) % 250 for i in range(64)],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


@dataclass
class Streams:
    """Clients that read one stream after the other, each over a connection that it keeps."""

    fleet: FleetProcess
    texts: dict[int, set[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    num_read: int = 0

    def __enter__(self) -> Streams:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(prompt,)) for prompt in range(NUM_PROMPTS)
        ]
        for thread in self._threads:
            thread.start()
        until(lambda: self.num_read >= NUM_PROMPTS, "streams flow")
        return self

    def __exit__(self, *_: object) -> None:
        read = self.num_read
        until(lambda: bool(self.errors) or self.num_read >= read + NUM_PROMPTS, "they flow on")
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self, prompt: int) -> None:
        address, key = urlsplit(self.fleet.file.url), self.fleet.key()
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        while not self._stop.is_set():
            try:
                connection.request("POST", "/v1/completions", json.dumps(body(prompt)), head)
                text = text_of(connection.getresponse())
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.errors.append(repr(error))
                connection.close()
            else:
                self.texts.setdefault(prompt, set()).add(text)
                self.num_read += 1
        connection.close()


def text_of(response: http.client.HTTPResponse) -> str:
    """Read a whole stream; fail unless it ends as it should."""
    events = [line[6:] for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert response.status == 200, response.status
    assert events[-1] == b"[DONE]", events[-1]
    chunks = [json.loads(event) for event in events[:-1]]
    assert "error" not in chunks[-1], chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@pytest.fixture
def undisturbed(fleet: FleetProcess) -> dict[int, set[str]]:
    """What each prompt is answered with when nothing happens."""
    with Streams(fleet) as streams:
        pass
    assert streams.errors == []
    return streams.texts


@pytest.fixture
def fleet(tmp_path: Path, tiny_model: Path) -> Iterator[FleetProcess]:
    running = FleetProcess(tmp_path, reloadable(tiny_model)).start()
    yield running
    running.kill()


def epochs(fleet: FleetProcess) -> dict[str, int]:
    replicas = fleet.admin("/admin/replicas").body["replicas"]
    return {replica["id"]: replica["epoch"] for replica in replicas if replica["live"]}


def test_replicas_and_gateway_restart_one_by_one_and_no_stream_differs(
    fleet: FleetProcess, tiny_model: Path, undisturbed: dict[int, set[str]]
) -> None:
    before, gateway = epochs(fleet), fleet.file.gateway.pid
    config = reloadable(tiny_model)
    config["worker"]["port"] = fleet.config["worker"]["port"]
    config["engine"] = {"max_num_seqs": 32}
    config["router"]["retry_share"] = 0.1
    fleet.rewrite(config)
    with Streams(fleet) as streams:
        done = fleet.command("reload")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:3] == [
        "to restart: replica-0 (engine.max_num_seqs)",
        "to restart: replica-1 (engine.max_num_seqs)",
        "to restart: the gateway (router.retry_share)",
    ]
    assert done.stdout.splitlines()[-1] == "reloaded"
    assert streams.errors == []
    assert streams.texts == undisturbed
    after = epochs(fleet)
    assert after.keys() == before.keys()
    assert all(after[name] > before[name] for name in before)
    assert fleet.file.gateway.pid not in (None, gateway)
    again = fleet.command("reload", "--json")
    assert json.loads(again.stdout) == {"done": True, "steps": []}


def test_the_number_of_replicas_changes_without_a_failed_stream(
    fleet: FleetProcess, undisturbed: dict[int, set[str]]
) -> None:
    before = epochs(fleet)
    with Streams(fleet) as streams:
        out = fleet.command("reload", "--replicas", "3")
        widest = epochs(fleet)
        back = fleet.command("reload", "--replicas", "1")
    assert (out.returncode, back.returncode) == (0, 0), out.stderr + back.stderr
    assert out.stdout.splitlines()[0] == "to start: replica-2"
    assert back.stdout.splitlines()[0] == "to end: replica-2, replica-1"
    assert widest == before | {"replica-2": widest["replica-2"]}
    assert [replica.id for replica in fleet.file.replicas] == ["replica-0"]
    until(lambda: epochs(fleet).keys() == {"replica-0"}, "the others have left")
    assert "cause=drained" in (fleet.run_dir / "logs" / "gateway.log").read_text()
    assert streams.errors == []
    assert streams.texts == undisturbed


def test_a_mistake_is_refused_whole_with_its_place_before_anything_is_touched(
    fleet: FleetProcess,
) -> None:
    processes = fleet.processes()
    for section, setting, words in [
        ("engine", {"max_num_seq": 32}, "engine.max_num_seq"),
        ("router", {"default_policy": "fastest"}, "router.default_policy"),
        ("router", {"port": 1}, "router.port: cannot change while the fleet runs"),
        ("engine", {"block_size": 32}, "engine.block_size: all replicas that serve tiny"),
        ("tenants", [{"name": "acme"}, {"name": "acme"}], "the name 'acme' is used twice"),
    ]:
        config = fleet.config
        changed = setting if isinstance(setting, list) else config.get(section, {}) | setting
        fleet.rewrite({**config, section: changed, "fleet": {**config["fleet"], "replicas": 1}})
        refused = fleet.command("reload")
        assert refused.returncode == 2, refused.stdout
        assert words in refused.stderr
        fleet.rewrite(config)
    assert fleet.processes() == processes
    assert fleet.command("reload").stdout == "nothing has changed\n"


def test_a_replica_that_does_not_come_back_gets_its_old_settings_and_stops_the_reload(
    fleet: FleetProcess, undisturbed: dict[int, set[str]]
) -> None:
    config, before = fleet.config, epochs(fleet)
    scripted = {**config["fleet"]["scripted"], "num_blocks": -1}
    fleet.rewrite({**config, "fleet": {**config["fleet"], "scripted": scripted}})
    with Streams(fleet) as streams:
        stopped = fleet.command("reload")
    assert stopped.returncode == 4
    assert "replica-0 did not come back with the new settings" in stopped.stderr
    assert streams.errors == []
    assert streams.texts == undisturbed
    after = epochs(fleet)
    assert after["replica-0"] > before["replica-0"]
    assert after["replica-1"] == before["replica-1"]


def test_the_processes_of_a_gateway_have_successors_and_no_connection_is_refused(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = reloadable(tiny_model)
    config["router"]["processes"] = 2
    fleet = FleetProcess(tmp_path, config).start()
    try:
        pids = fleet.file.gateway.pids
        fleet.rewrite({**config, "router": {**config["router"], "max_attempts": 4}})
        with Streams(fleet) as streams:
            done = fleet.command("reload")
        assert done.returncode == 0, done.stderr
        assert streams.errors == []
        successors = fleet.file.gateway.pids
        assert successors.keys() == pids.keys() == {"gateway", "gateway-1"}
        assert not {*successors.values()} & {*pids.values()}
        until(lambda: not any(is_alive(pid or 0) for pid in pids.values()), "they have left")
    finally:
        fleet.kill()


def test_dry_run_says_what_would_be_done_and_does_nothing(fleet: FleetProcess) -> None:
    processes = fleet.processes()
    done = fleet.command("reload", "--replicas", "3", "--dry-run")
    assert done.stdout == "to start: replica-2\nnothing was done (--dry-run)\n"
    assert fleet.processes() == processes
    other = fleet.command("reload", "-c", "configs/dev.yaml")
    assert other.returncode == 2
    assert f"this fleet was started with {fleet.config_file}" in other.stderr


def test_a_gateway_that_does_not_serve_leaves_its_place_to_the_old_one(
    fleet: FleetProcess,
) -> None:
    config, pid = fleet.config, fleet.file.gateway.pid
    record = {"path": str(fleet.run_dir / "nowhere" / "trace.jsonl")}
    fleet.rewrite({**config, "router": {**config["router"], "record": record}})
    with Streams(fleet) as streams:
        stopped = fleet.command("reload")
    assert stopped.returncode == 4
    assert "the successor of gateway does not serve: " in stopped.stderr
    assert "router.record.path" in stopped.stderr
    assert streams.errors == []
    assert fleet.file.gateway.pid == pid
    fleet.rewrite(config)
    assert fleet.command("reload").stdout == "nothing has changed\n"


def test_a_fleet_that_is_ended_in_the_middle_of_a_reload_leaves_nothing_behind(
    fleet: FleetProcess,
) -> None:
    config, before = fleet.config, fleet.processes()
    fleet.rewrite({**config, "engine": {"max_num_seqs": 32}})
    with ThreadPoolExecutor() as others:
        asked = others.submit(fleet.command, "reload")
        until(lambda: "replica-0: draining" in fleet.output, "the reload has begun")
        again = fleet.command("reload")
        assert (again.returncode, again.stderr) == (
            1,
            "prefixfleet: a reload is under way; `prefixfleet status` shows the processes\n",
        )
        until(
            lambda: "replica-0 is ready after" in fleet.output.partition("draining")[2], "is back"
        )
        processes = before | fleet.processes()
        assert fleet.stop(signal.SIGTERM) == 0
        broken_off = asked.result(30)
    assert broken_off.returncode == 1
    assert broken_off.stderr == "prefixfleet: the fleet is ending\n"
    assert not [pid for pid in processes if is_alive(pid)]
    assert not list(fleet.run_dir.rglob("*.sock"))
