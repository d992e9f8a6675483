"""schemathesis against gateway and replica: no 5xx, and every answer as the description says.

Replicas are scripted, so that thousands of odd requests cost no model.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvindex.index import LoadReport
from tests.router.fake_replica import LEASE_S
from tests.router.running_gateway import ACME_KEY, Running, running_gateway
from tests.worker.server.replica import running_replica

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance"
)


async def described(url: str, folder: Path) -> Path:
    """Return the description as a file, with the one model that there is filled in."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as answer:
        description = await answer.json()
    for name in ("ChatCompletionRequest", "CompletionRequest", "ResponsesBody"):
        description["components"]["schemas"][name]["properties"]["model"]["enum"] = ["tiny"]
    file = folder / "openapi.json"
    file.write_bytes(msgspec.json.encode(description))
    return file


async def check(url: str, key: str, folder: Path) -> None:
    """Let schemathesis try everything that the description at `url` offers."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        str(await described(url, folder)),
        f"--url={url}",
        f"--checks={CHECKS}",
        "--phases=examples,coverage,fuzzing",
        "--max-examples=30",
        "--seed=1",
        "--header=Authorization: Bearer " + key,
        "--request-timeout=20",
        "--no-color",
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-6000:]


async def stay(running: Running) -> None:
    """Keep the leases of the fake replicas, as a real one does."""
    while True:
        for known, replica in zip(running.gateway.view.replicas, running.replicas, strict=True):
            assert known.record is not None
            await running.stores.registry.publish(known.record, lease_s=LEASE_S)
            await replica.report(LoadReport(mode="EXACT"))
        await asyncio.sleep(LEASE_S / 6)


async def test_a_replica_answers_as_its_description_says(tmp_path: Path) -> None:
    async with running_replica(api_key="sk-replica") as replica:
        await check(replica.url, "sk-replica", tmp_path)
        assert replica.is_idle


async def test_the_gateway_answers_as_its_description_says(tmp_path: Path) -> None:
    async with running_gateway() as running, asyncio.TaskGroup() as tasks:
        staying = tasks.create_task(stay(running))
        await check(running.url, ACME_KEY, tmp_path)
        staying.cancel()


async def test_the_descriptions_are_open_and_name_every_client_route() -> None:
    async with running_replica(api_key="sk-replica") as replica:
        status, description = await replica.get("/openapi.json")
        assert status == 200
        assert "/v1/chat/completions" in description["paths"]
        text = msgspec.json.encode(description).decode()
        assert "FleetExtension" not in text
