"""SIGHUP makes a gateway process read its file again; it goes on serving."""

from __future__ import annotations

import signal
from pathlib import Path

import aiohttp
import msgspec

from router.config import ConfigSource
from tests.conditions import until
from tests.redis_server import free_port
from tests.router.running_gateway import ADMIN_KEY, gateway_spec
from tests.router.tenancy.test_reload import declared, write
from tests.router.test_gateway_process import answers, ended, start, write_spec


async def test_a_signal_applies_the_file_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    write(file, declared("acme"))
    port, admin_port = free_port(), free_port()
    spec = gateway_spec(tenants=(), port=port, admin_port=admin_port, poll_s=600)
    spec = msgspec.structs.replace(spec, source=ConfigSource(file=str(file)))
    process = await start(write_spec(tmp_path, spec))
    url = f"http://127.0.0.1:{admin_port}"
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            await until(lambda: answers(session, f"{url}/health"), seconds=20)

            async def names() -> list[str]:
                async with session.get(f"{url}/admin/tenants") as response:
                    return [t["tenant"]["name"] for t in (await response.json())["tenants"]]

            assert await names() == ["acme"]
            write(file, declared("globex"))
            process.send_signal(signal.SIGHUP)

            async def is_applied() -> bool:
                return await names() == ["globex"]

            await until(is_applied)
        process.send_signal(signal.SIGTERM)
        assert (await ended(process))[0] == 0
    finally:
        if process.returncode is None:
            process.kill()
