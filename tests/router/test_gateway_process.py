"""The gateway as a process: start, drain, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from pathlib import Path

import aiohttp
import msgspec

from router.config import GatewaySpec, StaticReplica
from tests.conditions import until
from tests.redis_server import free_port
from tests.router.fake_replica import Behaviour, FakeReplica
from tests.router.running_gateway import chat, gateway_spec


def write_spec(folder: Path, spec: GatewaySpec) -> Path:
    """Write a spec as the launcher does."""
    file = folder / "gateway.json"
    file.write_bytes(msgspec.json.encode(spec))
    return file


async def start(file: Path) -> Process:
    """Start the process with its standard error piped."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "router.gateway", "--config-json", str(file)),
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
    )


async def ended(process: Process) -> tuple[int, str]:
    """Wait for the end: exit code and standard error."""
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether something answers 200 there."""
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def test_sigterm_lets_a_stream_finish_and_exits_with_zero(tmp_path: Path) -> None:
    engine = FakeReplica("e0")
    await engine.start()
    engine.behaviour = Behaviour(hold=asyncio.Event())
    port, admin_port = free_port(), free_port()
    static = (StaticReplica(url=engine.url, name="e0"),)
    spec = gateway_spec(tenants=(), replicas=static, port=port, admin_port=admin_port)
    process = await start(write_spec(tmp_path, spec))
    try:
        async with aiohttp.ClientSession() as session:
            ready = False
            async with asyncio.timeout(20):
                while not ready:
                    ready = await answers(session, f"http://127.0.0.1:{port}/ready")
                    await asyncio.sleep(0.02)
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            call = asyncio.create_task(session.post(url, json=chat("x", stream=True)))
            await until(lambda: engine.num_running == 1)
            process.send_signal(signal.SIGTERM)
            draining = True
            async with asyncio.timeout(5):
                while draining:
                    draining = await answers(session, f"http://127.0.0.1:{admin_port}/ready")
            async with session.post(url, json=chat("y")) as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "draining"
            assert engine.behaviour.hold is not None
            engine.behaviour.hold.set()
            text = await (await call).text()
            assert text.endswith("data: [DONE]\n\n")
        code, _ = await ended(process)
        assert code == 0
    finally:
        if process.returncode is None:
            process.kill()
        await engine.stop()


async def test_a_port_in_use_is_one_line_and_exit_code_three(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = gateway_spec(tenants=(), port=port)
        code, errors = await ended(await start(write_spec(tmp_path, spec)))
    assert code == 3
    assert errors.splitlines()[-1] == (
        f"prefixfleet gateway: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "stop what uses it, or choose another port"
    )


async def test_a_spec_that_makes_no_sense_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    file.write_text('{"router": {"port": 99999}}')
    code, errors = await ended(await start(file))
    assert code == 2
    assert errors.startswith(f"prefixfleet gateway: {file}: Expected `int` <= 65535 - at `$.router")
