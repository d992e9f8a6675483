"""A gateway of several processes: one port, one scrape, one set of limits, one recording."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvindex.config import RedisConfig
from router.config import GatewaySpec, Limits, RecordConfig, StaticReplica, TenantConfig, TenantKey
from tests.conditions import until
from tests.redis_server import RedisServer, free_port
from tests.router.fake_replica import FakeReplica, key_hash
from tests.router.running_gateway import ADMIN_KEY, chat, gateway_spec
from tests.router.test_gateway_process import ended, start, write_spec

KEY = "sk-acme-0123456789"
NUM_PROCESSES = 2


@dataclass(slots=True)
class Processes:
    """A running parent, its children, and one engine behind them."""

    parent: asyncio.subprocess.Process
    engine: FakeReplica
    port: int
    admin_port: int
    headers: dict[str, str] = field(
        default_factory=lambda: {"authorization": f"Bearer {KEY}", "connection": "close"}
    )

    def pids(self) -> list[int]:
        """The children, oldest first."""
        parent = self.parent.pid
        return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]

    async def chat(self, text: str = "x") -> tuple[int, str]:
        """Send one request over a connection of its own: status and request id."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{self.port}/v1/chat/completions",
                json=chat(text),
                headers=self.headers,
            ) as answer,
        ):
            await answer.read()
            return answer.status, answer.headers["x-request-id"]

    async def admin(self, path: str) -> tuple[int, str]:
        """Ask the admin listener."""
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as session,
            session.get(f"http://127.0.0.1:{self.admin_port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def requests_by_process(self) -> dict[str, int]:
        """Return how many requests each process has answered, from one scrape."""
        _, text = await self.admin("/metrics")
        found: dict[str, int] = {}
        for line in text.splitlines():
            if line.startswith("prefixfleet_requests_total{"):
                process = re.search(r'process="(\d)"', line)
                assert process is not None, line
                found[process[1]] = found.get(process[1], 0) + int(float(line.rsplit(" ", 1)[1]))
        return found

    async def all_serve(self) -> None:
        """Return once every process answers a scrape."""
        await until(self._all_answer, seconds=60)

    async def _all_answer(self) -> bool:
        return f"prefixfleet_gateway_processes {NUM_PROCESSES}.0" in await self._scrape()

    async def _scrape(self) -> str:
        try:
            return (await self.admin("/metrics"))[1]
        except aiohttp.ClientConnectionError:
            return ""


@asynccontextmanager
async def running(
    folder: Path, redis: RedisServer, *, limits: Limits | None = None, **router: Any
) -> AsyncIterator[Processes]:
    """Run a gateway of two processes before one stock engine."""
    engine = FakeReplica("e0")
    await engine.start()
    ports: dict[str, Any] = {"port": free_port(), "admin_port": free_port()}
    tenant = TenantConfig(
        name="acme",
        keys=(TenantKey(hash=key_hash(KEY)),),
        limits=limits or Limits(),
        isolation="shared",
    )
    spec = gateway_spec(
        tenants=(tenant,),
        replicas=(StaticReplica(url=engine.url, name="e0"),),
        processes=NUM_PROCESSES,
        **ports,
        **router,
    )
    spec = msgspec.structs.replace(spec, redis=RedisConfig(index_url=redis.url))
    parent = await start(write_spec(folder, spec))
    processes = Processes(parent, engine, **ports)
    try:
        await processes.all_serve()
        yield processes
    finally:
        if parent.returncode is None:
            parent.terminate()
            await ended(parent)
        await engine.stop()


async def test_processes_share_a_port_a_scrape_and_the_memory_of_decisions(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis) as gateway:
        answers = [await gateway.chat() for _ in range(24)]
        assert {status for status, _ in answers} == {200}
        counts = await gateway.requests_by_process()
        assert sum(counts.values()) == 24
        assert set(counts) == {"0", "1"}  # Each missed by all 24 connections once in 8 million.
        for _, request_id in answers:
            status, body = await gateway.admin(f"/admin/decisions/{request_id}")
            assert (status, msgspec.json.decode(body)["request_id"]) == (200, request_id)
        _, body = await gateway.admin("/admin/live?once=true")
        state = msgspec.json.decode(body)
        assert sorted(record["request_id"] for record in state["decisions"]) == sorted(
            request_id for _, request_id in answers
        )
        assert [tenant["requests"] for tenant in state["tenants"]] == [24]
        gateway.parent.terminate()
        code, _ = await ended(gateway.parent)
    assert code == 0


async def test_limits_hold_over_all_processes(tmp_path: Path, private_redis: RedisServer) -> None:
    limits = Limits(requests_per_minute=10)
    async with running(tmp_path, private_redis, limits=limits) as gateway:
        answers = await asyncio.gather(*(gateway.chat(str(i)) for i in range(20)))
    statuses = [status for status, _ in answers]
    assert (statuses.count(200), statuses.count(429)) == (10, 10)


async def test_a_process_that_dies_loses_no_connection_that_it_had_not_begun_to_serve(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis) as gateway:
        first, second = gateway.pids()
        os.kill(second, signal.SIGKILL)
        answers = await asyncio.gather(*(gateway.chat() for _ in range(12)))
        assert {status for status, _ in answers} == {200}
        await gateway.all_serve()
        assert gateway.pids()[0] == first
        assert second not in gateway.pids()
        assert len(gateway.pids()) == NUM_PROCESSES


@pytest.mark.slow
async def test_a_reload_reaches_every_process(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis) as gateway:
        gateway.parent.send_signal(signal.SIGHUP)
        # Without a file to read, each process says that it was asked, and refuses.
        wanted = {
            f'prefixfleet_config_reloads_total{{process="{i}",result="rejected"}} 1.0'
            for i in range(NUM_PROCESSES)
        }

        async def all_were_asked() -> bool:
            return wanted <= set((await gateway.admin("/metrics"))[1].splitlines())

        await until(all_were_asked, seconds=30)


@pytest.mark.slow
async def test_processes_write_files_of_their_own_that_are_one_recording(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    record = RecordConfig(path=str(tmp_path / "trace.jsonl"))
    async with running(tmp_path, private_redis, record=record) as gateway:
        assert {status for status, _ in [await gateway.chat() for _ in range(24)]} == {200}
    rows = {
        name: [msgspec.json.decode(line) for line in (tmp_path / name).read_bytes().splitlines()]
        for name in ("trace.p0.jsonl", "trace.p1.jsonl")
    }
    assert sum(len(of_one) - 1 for of_one in rows.values()) == 24
    assert {of_one[0]["schema"] for of_one in rows.values()} == {"kvtrace/1"}


async def test_several_processes_without_a_redis_to_share_are_refused(tmp_path: Path) -> None:
    spec: GatewaySpec = gateway_spec(tenants=(), processes=2)
    code, errors = await ended(await start(write_spec(tmp_path, spec)))
    assert code == 2
    assert errors.splitlines()[-1] == (
        "prefixfleet gateway: router.processes: several processes share tenants, limits and "
        "decisions in Redis; name one in redis.index_url or redis.state_url, or use one process"
    )


async def test_settings_that_no_process_can_use_end_the_parent(tmp_path: Path) -> None:
    redis = RedisConfig(index_url="redis://127.0.0.1:1/0")
    spec = gateway_spec(tenants=(), processes=2, default_policy="fastest", port=free_port())
    spec = msgspec.structs.replace(spec, redis=redis)
    code, errors = await ended(await start(write_spec(tmp_path, spec)))
    assert code == 2
    assert "fastest" in errors
    assert re.fullmatch(r"prefixfleet gateway: process [01] cannot start", errors.splitlines()[-1])
