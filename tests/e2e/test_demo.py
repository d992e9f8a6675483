"""The demo as a user gets it: a real model on two replicas, started twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from router.launch.config import demo_config_file
from tests.e2e.fleet_process import REPOSITORY, FleetProcess, answers, http, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

RULES = "A reader may borrow ten books for four weeks, and extend each loan twice. " * 40


def demo(folder: Path) -> FleetProcess:
    config = yaml.safe_load(demo_config_file().read_text())
    config["router"] = {"port": 0, "admin_port": 0}
    config["worker"] |= {"dtype": "float32", "port": 18300}
    return FleetProcess(folder, config)


def chat(question: str, **more: object) -> dict[str, object]:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    return {
        "model": "SmolLM2-135M-Instruct",
        "messages": messages,
        "max_tokens": 16,
        "temperature": 0,
        **more,
    }


def seconds_to_ready(fleet: FleetProcess) -> float:
    line = next(line for line in fleet.output.splitlines() if line.startswith("ready after"))
    return float(line.split()[2])


def is_busy() -> bool:
    """Tell whether others compute here too: two replicas that start make a load of 2."""
    return os.getloadavg()[0] > 2.0 + len(os.sched_getaffinity(0)) / 2


def test_the_demo_answers_hits_its_cache_isolates_tenants_and_starts_again_quickly(
    tmp_path: Path,
) -> None:
    fleet = demo(tmp_path).start()
    try:
        first = fleet.post("/v1/chat/completions", chat("How many books may I borrow?"))
        again = fleet.post("/v1/chat/completions", chat("How long may I keep a book?"))
        other = fleet.post(
            "/v1/chat/completions", chat("How long may I keep a book?"), tenant="globex"
        )
        assert first.status == again.status == other.status == 200, first.body
        assert first.body["choices"][0]["message"]["content"]
        cached = [
            reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
            for reply in (first, again, other)
        ]
        assert cached[0] == cached[2] == 0
        assert cached[1] >= 512
        assert cached[1] % 16 == 0
        assert again.headers["x-prefixfleet-cached-tokens-predicted"] == str(cached[1])
        assert again.headers["x-prefixfleet-replica"] == first.headers["x-prefixfleet-replica"]
        assert fleet.stop(signal.SIGTERM) == 0
        fleet.start()
        assert seconds_to_ready(fleet) <= 20.0 or is_busy()
        assert http(f"{fleet.file.url}/v1/models", key=fleet.key()).status == 200
    finally:
        fleet.kill()


@pytest.mark.fault("router-45")
def test_a_stream_of_a_real_model_survives_the_death_of_its_replica(tmp_path: Path) -> None:
    fleet = demo(tmp_path).start()
    try:
        body = chat("Tell me all rules.", max_tokens=48, temperature=0.7, seed=11, stream=True)
        undisturbed, replica = stream(fleet, body)
        assert undisturbed[-1] == "[DONE]"
        pid = next(r.pid for r in fleet.file.replicas if r.id == replica)
        assert pid is not None
        disturbed, first = stream(fleet, body, kill_after=8, pid=pid)
        assert first == replica
        assert text_of(disturbed) == text_of(undisturbed)
        assert disturbed[-1] == "[DONE]"
    finally:
        fleet.kill()


def stream(
    fleet: FleetProcess, body: dict[str, object], *, kill_after: int = 0, pid: int = 0
) -> tuple[list[str], str]:
    """Read a stream: its events and its first replica; `pid` is killed after some events."""
    request = urllib.request.Request(
        f"{fleet.file.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {fleet.key()}",
        },
    )
    events: list[str] = []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: "):
                events.append(line[6:].decode().strip())
                if len(events) == kill_after:
                    os.kill(pid, signal.SIGKILL)
        return events, response.headers["x-prefixfleet-replica"]


def text_of(events: list[str]) -> str:
    """Join the text of all chunks; an error event has none, and fails."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_a_gateway_stands_in_front_of_engines_that_know_nothing_of_it(tmp_path: Path) -> None:
    """`prefixfleet gateway --replica` before a lone `prefixfleet engine`, in FALLBACK."""
    engine = _spawn(tmp_path, "engine", "demo", "--port", "18310", "--max-model-len", "1024")
    try:
        until(lambda: answers("http://127.0.0.1:18310/health"), "the engine is up", within_s=90)
        gateway = _spawn(
            tmp_path,
            *("gateway", "--replica", "http://127.0.0.1:18310", "--port", "18311"),
            *("--admin-port", "18312", "--run-dir", str(tmp_path / "run")),
        )
        try:
            until(lambda: answers("http://127.0.0.1:18311/ready"), "the gateway is up")
            body = chat("Hello", messages=[{"role": "user", "content": "Hello"}])
            reply = http("http://127.0.0.1:18311/v1/chat/completions", body=body)
            assert reply.status == 200, reply.body
            assert reply.headers["x-prefixfleet-mode"] == "FALLBACK"
            assert reply.body["usage"]["completion_tokens"] <= 16
        finally:
            gateway.send_signal(signal.SIGTERM)
            assert gateway.wait(30) == 0
    finally:
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(30) == 0


def _spawn(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / f"{words[0]}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "router.cli", *words], cwd=REPOSITORY, stdout=log, stderr=log
        )
