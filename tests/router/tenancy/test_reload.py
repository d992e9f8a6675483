"""Reading the configuration again: a bad file changes nothing, a good one all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from router.config import ConfigSource, TenantConfig, TenantKey
from tests.conditions import until
from tests.router.fake_replica import key_hash
from tests.router.running_gateway import Running, completion, gateway_spec, running_gateway


def declared(name: str, **fields: Any) -> dict[str, Any]:
    """Return a tenant as a file declares it."""
    return {"name": name, "keys": [{"hash": key_hash(f"sk-{name}")}], **fields}


def write(file: Path, *tenants: dict[str, Any], **router: Any) -> None:
    """Replace a configuration file in one step, as editors do."""
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"router": router, "tenants": list(tenants)}))
    new.replace(file)


@asynccontextmanager
async def reloading(file: Path, **router: Any) -> AsyncIterator[Running]:
    """Run a gateway that was started from a file."""
    spec = gateway_spec(tenants=(), poll_s=600, **router)
    spec = msgspec.structs.replace(spec, source=ConfigSource(file=str(file)))
    async with running_gateway(spec, replicas=0) as running:
        yield running


async def status_of(running: Running, tenant: str) -> int:
    """Return the status of the model list for a tenant's key: 200 or 401."""
    headers = {"authorization": f"Bearer sk-{tenant}"}
    async with running.session.get(f"{running.url}/v1/models", headers=headers) as response:
        return response.status


def num_pollers() -> int:
    """Return how many tasks look after something again and again."""
    return sum("_every_poll" in repr(task) for task in asyncio.all_tasks())


async def reload(running: Running) -> tuple[int, Any]:
    return await running.admin("/admin/config/reload", method="POST")


@pytest.mark.fault("router-49")
async def test_a_bad_file_is_refused_with_its_place_and_the_good_one_after_it_applied(
    tmp_path: Path,
) -> None:
    file = tmp_path / "fleet.yaml"
    write(file, declared("acme"))
    async with reloading(file) as running:
        before = num_pollers()
        write(file, declared("acme"), declared("globex", weigth=2))
        status, answer = await reload(running)
        assert status == 422
        place = f"{file}: tenants[1].weigth: unknown field; did you mean 'weight'?"
        assert answer["error"]["message"].startswith(place)
        file.write_text("tenants: [{name: acme")
        status, answer = await reload(running)
        assert (status, answer["error"]["message"][: len(str(file))]) == (422, str(file))
        assert [await status_of(running, name) for name in ("acme", "globex")] == [200, 401]
        write(file, declared("globex"))
        status, answer = await reload(running)
        assert (status, answer["result"]) == (200, "applied")
        assert [await status_of(running, name) for name in ("acme", "globex")] == [401, 200]
        _, text = await running.admin("/metrics")
        assert 'prefixfleet_config_reloads_total{result="rejected"} 2.0' in text
        assert num_pollers() == before


@pytest.mark.fault("router-49")
async def test_what_the_gateway_has_learned_survives_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    write(file, declared("acme"))
    spec = gateway_spec(tenants=())
    spec = msgspec.structs.replace(spec, source=ConfigSource(file=str(file)))
    async with running_gateway(spec, replicas=2) as running:
        long = completion("a prompt of several blocks " * 8)
        _, _, first = await running.post("/v1/completions", long, key="sk-acme")
        accounts = running.gateway.planner.ledger.accounts
        write(file, declared("acme", weight=3.0), declared("globex"))
        await until(lambda: running.gateway.reload.state.version == 3)
        assert running.gateway.planner.ledger.accounts is accounts
        assert accounts
        _, answer, second = await running.post("/v1/completions", long, key="sk-acme")
        assert second["x-prefixfleet-replica"] == first["x-prefixfleet-replica"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_tenants_that_contradict_each_other_are_refused_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    write(file, declared("acme"))
    async with reloading(file) as running:
        write(file, declared("new"), declared("new"))
        status, answer = await reload(running)
        assert (status, answer["error"]["message"]) == (
            422,
            f"{file}: tenants: the name 'new' is used twice",
        )
        write(file, declared("acme"), default_policy="nearest")
        status, answer = await reload(running)
        assert (status, "no policy 'nearest'" in answer["error"]["message"]) == (422, True)
        assert [await status_of(running, name) for name in ("acme", "new")] == [200, 401]


async def test_settings_that_need_a_restart_are_named(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    write(file, declared("acme"))
    async with reloading(file) as running:
        status, answer = await reload(running)
        assert (status, answer["result"]) == (200, "unchanged")
        write(file, declared("acme"), max_in_flight=7, default_policy="least_load")
        status, answer = await reload(running)
        assert (status, answer["result"]) == (200, "applied")
        assert "router.max_in_flight" in answer["needs_restart"]
        assert "router.default_policy" not in answer["needs_restart"]
        _, state = await running.admin("/admin/config")
        assert (state["file"], state["version"]) == (str(file), answer["version"])


async def test_a_key_that_was_generated_at_the_start_stays(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    write(file, {"name": "acme"})
    generated = TenantKey(hash=key_hash("sk-acme"), alias="generated")
    spec = gateway_spec(tenants=(TenantConfig(name="acme", keys=(generated,)),))
    spec = msgspec.structs.replace(spec, source=ConfigSource(file=str(file)))
    async with running_gateway(spec, replicas=0) as running:
        write(file, {"name": "acme", "weight": 2.0}, {"name": "other"})
        assert (await reload(running))[1]["result"] == "applied"
        assert await status_of(running, "acme") == 200


async def test_without_a_file_there_is_nothing_to_reload() -> None:
    async with running_gateway(replicas=0) as running:
        status, answer = await reload(running)
        assert (status, answer["error"]["message"]) == (
            422,
            "this gateway was started without a configuration file",
        )
