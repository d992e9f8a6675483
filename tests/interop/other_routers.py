"""KV-aware routers of other make as child processes, from environments of their own.

`PREFIXFLEET_VLLM_ROUTER` names the executable of vllm-router, `PREFIXFLEET_SMG_PYTHON` an
interpreter with smg; tests that need one are skipped where it is unset.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.redis_server import free_port
from tests.worker.server.replica_process import until_true

VLLM_ROUTER = "PREFIXFLEET_VLLM_ROUTER"
SMG_PYTHON = "PREFIXFLEET_SMG_PYTHON"
START_TIMEOUT_S = 60.0


@dataclass
class Worker:
    """A replica as a router is told of it."""

    url: str
    events: str
    replay: str


@dataclass
class Router:
    """A router that runs."""

    url: str
    metrics_url: str
    session: aiohttp.ClientSession

    async def counted(self, sample: str) -> float:
        """Return the value of a metric sample, 0 when it is not there yet."""
        async with self.session.get(self.metrics_url) as answer:
            lines = (await answer.text()).splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(sample)), 0.0)


RouterCommand = Callable[[Sequence[Worker], int, int], list[str]]
"""(replicas, port, port of the metrics) -> the command of a router before them."""


def vllm_router_command(workers: Sequence[Worker], port: int, metrics_port: int) -> list[str]:
    """Return the command of vllm-router before replicas of ours; it is told where events are."""
    command = [os.environ[VLLM_ROUTER], "--policy", "kv_aware", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", *(worker.url for worker in workers)]
    command += ["--kv-event-model", "tiny", "--kv-event-block-size", "16"]
    for worker in workers:
        command += ["--kv-event-source", f"{worker.url}={worker.events}"]
        command += ["--kv-event-replay-source", f"{worker.url}={worker.replay}"]
    return command


def smg_command(workers: Sequence[Worker], port: int, metrics_port: int) -> list[str]:
    """Return the command of smg before replicas of ours; over HTTP it has only its own history."""
    command = [os.environ[SMG_PYTHON], "-m", "smg", "launch", "--policy", "cache_aware"]
    command += ["--port", str(port), "--prometheus-port", str(metrics_port)]
    return [*command, "--worker-urls", *(worker.url for worker in workers)]


@asynccontextmanager
async def running_router(
    command_of: RouterCommand, workers: Sequence[Worker], log: Path
) -> AsyncIterator[Router]:
    """Run a router before replicas of ours until it serves; killed in the end."""
    port, metrics_port = free_ports(2)
    command = command_of(workers, port, metrics_port)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        router = Router(url, f"http://127.0.0.1:{metrics_port}/metrics", session)

        async def serves() -> bool:
            assert process.returncode is None, f"the router ended; {log} says why"
            try:
                async with session.get(f"{url}/v1/models") as answer:
                    return answer.status == 200
            except aiohttp.ClientConnectionError:
                return False

        try:
            await until_true(serves, timeout_s=START_TIMEOUT_S)
            yield router
        finally:
            process.kill()
            await process.wait()


async def cached_tokens(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Send a request and return how many tokens of its prompt were cached."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with session.post(url + path, json={"model": "tiny", "max_tokens": 1, **body}) as answer:
        reply = await answer.json()
        assert answer.status == 200, reply
    cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    return [free_port() for _ in range(count)]
