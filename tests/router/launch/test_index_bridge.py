"""`prefixfleet index bridge`: its flags, and the process that brings a vLLM into a fleet."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_registry import RedisRegistry
from kvindex.registry import ReplicaRecord, pool_id
from router.cli import main
from router.launch.run_dir import RunDirectory
from router.launch.secrets import load_or_create_secrets
from tests.conditions import until
from tests.engine.frontend.tiny_tokenizer import write_model_folder
from tests.redis_server import RedisServer, private_redis
from tests.router.fake_vllm import FakeVllm

__all__ = ["private_redis"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "--engine"),
        (["--engine", "10.0.0.7:8000"], "expected http://HOST:PORT"),
        (["--engine", "http://h:1", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--engine", "http://h:1", "--event", "auto"], "--events"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", "bridge", *flags, "--run-dir", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
async def test_a_bridge_registers_an_engine_and_takes_it_out_at_its_end(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create()
    secret = load_or_create_secrets(run_dir).fleet_secret.encode()
    vllm = FakeVllm(root=str(write_model_folder(tmp_path / "model")))
    await vllm.start()
    registry = RedisRegistry(connect(private_redis.url), secret)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli", "index", "bridge"),
        *("--engine", vllm.url, "--name", "stock", "--redis", private_redis.url),
        *("--run-dir", str(run_dir.path)),
    )
    found: list[ReplicaRecord] = []

    async def is_registered() -> bool:
        found[:] = await registry.records()
        return bool(found)

    await until(is_registered, seconds=30)
    (record,) = found
    assert (record.id, record.kind, record.url) == ("stock", "vllm", vllm.url)
    pool = pool_id(record.served_models[0], record.identity, record.hash_scheme)
    index = RedisIndex(connect(private_redis.url), pool)

    async def is_exact() -> bool:
        return [state.report.mode for state in await index.states()] == ["EXACT"]

    await until(is_exact, seconds=10)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert await registry.records() == []
    assert await index.states() == []
    await index.close()
    await registry.close()
    await vllm.stop()
