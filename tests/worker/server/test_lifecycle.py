"""A replica process from start to end: ready, drained, robbed of its engine, misconfigured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.frontend.sse import SseParser
from tests.worker.server.replica_process import ReplicaProcess, spec_fields, started_replica
from worker.server.main import main

BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": list(range(40)),
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
}
ROOT = Path(__file__).parents[3]


async def begin_stream(replica: ReplicaProcess, **changes: Any) -> aiohttp.ClientResponse:
    """Start a stream and return it when its first event has come."""
    response = await replica.session.post(
        replica.url + "/v1/completions",
        json=BODY | {"stream": True} | changes,
        headers=replica.headers,
    )
    assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
    return response


def run_main(config: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "worker.server.main", "--config-json", str(config)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_the_front_starts_without_torch() -> None:
    code = (
        "import sys, worker.server.lifecycle, worker.server.main, worker.core.process\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.fault("router-47")
async def test_sigterm_finishes_the_streams_takes_no_new_ones_and_exits_0(tmp_path: Path) -> None:
    async with started_replica(tmp_path) as replica:
        await replica.wait_health(status="ready")
        stream = await begin_stream(replica, max_tokens=100)
        replica.process.send_signal(signal.SIGTERM)
        await replica.wait_health(status="draining")
        status, answer = await replica.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "draining")
        events = SseParser().feed(await stream.content.read())
        assert events[-1].is_done
        assert json.loads(events[-2].data)["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(replica.process.wait(), 10) == 0
        assert await replica.health() is None
        assert list((tmp_path / "sockets").iterdir()) == []


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with started_replica(tmp_path, drain_timeout_s=60.0) as replica:
        await replica.wait_health(status="ready")
        await begin_stream(replica, n=20)
        replica.process.send_signal(signal.SIGINT)
        await replica.wait_health(status="draining")
        replica.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(replica.process.wait(), 5) == 0


@pytest.mark.fault("router-41")
async def test_leaving_a_stream_of_a_real_replica_frees_its_blocks_within_a_second(
    tmp_path: Path,
) -> None:
    async with started_replica(tmp_path) as replica:
        await replica.wait_health(status="ready")
        stream = await begin_stream(replica, n=3)
        stream.close()
        # Within a second, and the heartbeat that tells of it.
        await replica.wait_metric("vllm:num_requests_running", 0, timeout_s=1.5)
        assert await replica.metric("vllm:kv_cache_usage_perc") == 0
        assert await replica.metric("vllm:generation_tokens_total") < 1200
        assert await replica.stop() == 0


@pytest.mark.fault("router-45")
async def test_a_dead_engine_ends_streams_with_an_error_and_the_process_with_1(
    tmp_path: Path,
) -> None:
    async with started_replica(tmp_path) as replica:
        await replica.wait_health(status="ready")
        stream = await begin_stream(replica)
        os.kill(replica.core_pid(), signal.SIGKILL)
        events = SseParser().feed(await stream.content.read())
        assert json.loads(events[-1].data)["error"]["code"] == "engine_dead"
        assert not any(event.is_done for event in events)
        assert await asyncio.wait_for(replica.process.wait(), 5) == 1
    assert "engine is dead" in replica.log.read_text()


def test_a_port_in_use_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = tmp_path / "spec.json"
        config.write_text(json.dumps(spec_fields(tmp_path, port=port)))
        ended = run_main(config)
    assert ended.returncode == 3
    expected = (
        f"prefixfleet: cannot listen on 127.0.0.1:{port}: it is in use; choose another port\n"
    )
    assert ended.stderr == expected


def test_a_model_folder_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "spec.json"
    config.write_text(json.dumps(spec_fields(tmp_path, model_folder="/nowhere")))
    ended = run_main(config)
    assert ended.returncode == 2
    expected = "model folder /nowhere has no tokenizer.json; a Hugging Face folder has one"
    assert ended.stderr == f"prefixfleet: {expected}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"served_models": []}, "served_models is empty; name at least one model"),
        ({"prot": 1}, "Object contains unknown field `prot`"),
        ({"port": "x"}, "Expected `int`, got `str` - at `$.port`"),
        ({"index_url": "redis://x"}, "internal_token and fleet_secret are needed too"),
        ({"lease_s": 0.1}, "lease_s=0.1 must exceed renew_s=0.2 > 0"),
    ],
)
def test_a_wrong_spec_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    config = tmp_path / "spec.json"
    config.write_text(json.dumps(spec_fields(tmp_path) | changes))
    assert main(["--config-json", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"prefixfleet: {config}: ")
    assert message in line


def test_a_spec_that_is_not_there_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config-json", "/nowhere.json"]) == 2
    assert capsys.readouterr().err == "prefixfleet: /nowhere.json: No such file or directory\n"
