"""A replica as a real process, scripted executor, for tests of its life and death."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.engine.frontend.tiny_tokenizer import MAX_MODEL_LEN, VOCAB_SIZE, write_model_folder
from tests.redis_server import free_port

NUM_BLOCKS = 129


async def until_true(check: Callable[[], Awaitable[bool]], *, timeout_s: float = 15.0) -> None:
    """Ask again and again until the answer is yes; TimeoutError after the deadline."""
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110  (the state is another process's)
            await asyncio.sleep(0.02)


@dataclass(slots=True)
class ReplicaProcess:
    """A replica that was started; `log` is where its standard error goes."""

    process: asyncio.subprocess.Process
    url: str
    token: str | None
    log: Path
    session: aiohttp.ClientSession

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    async def health(self) -> tuple[int, dict[str, Any]] | None:
        """Return what /health says, None when nobody listens."""
        try:
            async with self.session.get(self.url + "/health") as response:
                return response.status, await response.json()
        except aiohttp.ClientConnectionError:
            return None

    async def wait_health(self, **expected: Any) -> None:
        """Wait until /health shows the given fields."""

        async def shows_it() -> bool:
            found = await self.health()
            return found is not None and expected.items() <= found[1].items()

        await until_true(shows_it)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=self.headers) as answer:
            return answer.status, await answer.json()

    async def metric(self, name: str) -> float:
        async with self.session.get(self.url + "/metrics", headers=self.headers) as response:
            lines = (await response.text()).splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name + "{")))

    async def wait_metric(self, name: str, value: float, *, timeout_s: float) -> None:
        """Wait until a metric has a value."""

        async def has_value() -> bool:
            return await self.metric(name) == value

        await until_true(has_value, timeout_s=timeout_s)

    def core_pid(self) -> int:
        """Process id of the engine core, the only child."""
        (pid,) = self.core_pids()
        return pid

    def core_pids(self) -> list[int]:
        """Process ids of the engine cores."""
        pid = self.process.pid
        return [int(core) for core in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def stop(self) -> int:
        """Ask it to end and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 15)


def spec_fields(folder: Path, **changes: Any) -> dict[str, Any]:
    """A spec as the launcher writes it."""
    return {
        "replica_id": "r0",
        "host": "127.0.0.1",
        "port": free_port(),
        "model_folder": str(write_model_folder(folder / "model")),
        "served_models": ["tiny"],
        "dtype": "auto",
        "num_threads": 1,
        "engine": {"check_integrity": True},
        "kv_cache_memory_bytes": None,
        "internal_token": None,
        "fleet_secret": None,
        "index_url": None,
        "socket_dir": str(folder / "sockets"),
        "renew_s": 0.2,
        "lease_s": 2.0,
        "drain_timeout_s": 10.0,
        "executor": "scripted",
        "scripted": {
            "vocab_size": VOCAB_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "num_blocks": NUM_BLOCKS,
            "cost": {"base_s": 0.005},
        },
    } | changes


@asynccontextmanager
async def started_replica(folder: Path, **changes: Any) -> AsyncIterator[ReplicaProcess]:
    """Start a replica process; whatever is left of it afterwards is killed."""
    fields = spec_fields(folder, **changes)
    config, log = folder / "spec.json", folder / "replica.log"
    config.write_text(json.dumps(fields))
    argv = ["-P", "-m", "worker.server.main", "--config-json", str(config)]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=output)
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{fields['port']}"
        try:
            yield ReplicaProcess(process, url, fields["internal_token"], log, session)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
