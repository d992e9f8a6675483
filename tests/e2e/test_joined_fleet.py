"""A fleet without `up`: engines that join by Redis and shared secrets, as on several machines."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from router.launch.ports import any_free_port
from router.launch.secrets import VARIABLES, shared_secrets
from tests.e2e.fleet_process import REPOSITORY, answers, http, scripted_config, until
from tests.redis_server import RedisServer

SECRETS = {variable: f"{name}-of-this-test-fleet" for name, variable in VARIABLES.items()}
PROMPT = list(range(40, 104))
KEY = "sk-acme-of-this-test"


@contextmanager
def running(
    folder: Path, name: str, *words: str, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of the command line until the block ends."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "router.cli", *words],
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            env={**os.environ, **SECRETS, **environ},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def config_file(folder: Path, model: Path, redis: str) -> Path:
    """Write one configuration for every machine."""
    config: dict[str, Any] = scripted_config(model)
    config["redis"] = {"index_url": redis}
    config["fleet"]["run_dir"] = str(folder / "run")
    config["tenants"] = [
        {"name": "acme", "keys": [{"hash": hashlib.sha256(KEY.encode()).hexdigest()}]}
    ]
    file = folder / "fleet.yaml"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.slow
def test_engines_join_serve_and_leave(
    tmp_path: Path, tiny_model: Path, private_redis: RedisServer
) -> None:
    file = config_file(tmp_path, tiny_model, private_redis.url)
    ports = [any_free_port("127.0.0.1") for _ in range(4)]
    url, admin = (f"http://127.0.0.1:{port}" for port in ports[2:])

    def engine(name: str, port: int) -> tuple[str, ...]:
        return ("engine", "-c", str(file), "--join", "--replica-id", name, "--port", str(port))

    def live() -> set[str]:
        listed = http(f"{admin}/admin/replicas", key=SECRETS["PREFIXFLEET_ADMIN_KEY"]).body
        return {replica["id"] for replica in listed["replicas"] if replica["live"]}

    def ask() -> tuple[str, int]:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        reply = http(f"{url}/v1/completions", key=KEY, body=body)
        assert reply.status == 200, reply.body
        cached = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reply.headers["x-prefixfleet-replica"], cached

    gateway = ("gateway", "-c", str(file), "--port", str(ports[2]), "--admin-port", str(ports[3]))
    with (
        running(tmp_path, "gateway", *gateway),
        running(tmp_path, "a", *engine("a", ports[0])) as first,
        running(tmp_path, "b", *engine("b", ports[1])),
    ):
        until(lambda: answers(f"{url}/ready") and live() == {"a", "b"}, "both engines joined")
        served, cached = ask()
        assert cached == 0
        assert ask() == (served, 48)
        first.send_signal(signal.SIGTERM)
        until(lambda: live() == {"b"}, "the gateway knows that one has left")
        assert ask()[0] == "b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--join",), "--join needs the fleet's Redis: --redis URL, or redis.index_url"),
        (("--join", "--redis", "redis://127.0.0.1:1/0"), "--join needs the fleet's secrets in"),
    ],
)
def test_joining_says_what_it_lacks(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "router.cli", "engine", str(tmp_path), "--port", "0", *words],
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if k not in SECRETS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_shared_secrets_are_all_there_or_the_missing_one_is_named() -> None:
    assert shared_secrets({}) is None
    assert shared_secrets({"PREFIXFLEET_ADMIN_KEY": "only-the-commands-key"}) is None
    found = shared_secrets(SECRETS)
    assert found is not None
    assert found.internal_token == "internal_token-of-this-test-fleet"
    with pytest.raises(ConfigError, match="PREFIXFLEET_INTERNAL_TOKEN is missing"):
        shared_secrets({**SECRETS, "PREFIXFLEET_INTERNAL_TOKEN": ""})
    with pytest.raises(ConfigError, match="has fewer than 16 characters"):
        shared_secrets({**SECRETS, "PREFIXFLEET_FLEET_SECRET": "short"})
