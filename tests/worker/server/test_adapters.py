"""Adapters at a replica's front: loaded, listed, asked for by name, unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvindex.registry import ServedAdapter
from tests.worker.adapter_folders import write_adapter_files
from tests.worker.server.replica import RunningReplica, running_replica

PROMPT = list(range(40))


async def text(replica: RunningReplica, path: str, body: Any) -> tuple[int, str]:
    """Post JSON and return status and plain answer."""
    async with replica.session.post(replica.url + path, json=body) as response:
        return response.status, await response.text()


async def load(replica: RunningReplica, name: str, folder: Path, **more: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return await text(replica, "/v1/load_lora_adapter", body)


async def cached(replica: RunningReplica, model: str) -> int:
    """Run PROMPT with a model and return how much of it was cached."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    status, answer = await replica.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


async def test_a_loaded_adapter_is_a_model_name_with_a_cache_of_its_own(tmp_path: Path) -> None:
    folder = write_adapter_files(tmp_path / "sql")
    async with running_replica() as replica:
        answer = await load(replica, "sql", folder)
        assert answer == (200, "Success: LoRA adapter 'sql' added successfully.")
        _, models = await replica.get("/v1/models")
        base, adapter = models["data"]
        assert (base["id"], base.get("parent")) == ("tiny", None)
        assert (adapter["id"], adapter["parent"]) == ("sql", "tiny")
        assert adapter["root"] == str(folder)
        assert [await cached(replica, name) for name in ("tiny", "sql", "tiny", "sql")] == [
            0,
            0,
            32,
            32,
        ]


async def test_an_unloaded_adapter_is_no_model_any_more(tmp_path: Path) -> None:
    folder = write_adapter_files(tmp_path / "sql")
    async with running_replica() as replica:
        await load(replica, "sql", folder)
        answer = await text(replica, "/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert answer == (200, "Success: LoRA adapter 'sql' removed successfully.")
        status, error = await replica.post("/v1/completions", {"model": "sql", "prompt": PROMPT})
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        status, _ = await text(replica, "/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert status == 404


async def test_a_name_in_use_is_replaced_only_when_asked(tmp_path: Path) -> None:
    one = write_adapter_files(tmp_path / "one", content=b"one")
    two = write_adapter_files(tmp_path / "two", content=b"two")
    async with running_replica() as replica:
        await load(replica, "sql", one)
        status, answer = await load(replica, "sql", two)
        assert status == 400
        assert "loaded already" in answer
        assert await cached(replica, "sql") == 0
        assert (await load(replica, "sql", two, load_inplace=True))[0] == 200
        assert await cached(replica, "sql") == 0
        assert [record.path for record in replica.front.adapters.records()] == [str(two)]


async def test_other_weights_in_the_same_folder_take_nothing_from_the_cache(
    tmp_path: Path,
) -> None:
    folder = write_adapter_files(tmp_path / "sql", content=b"old")
    async with running_replica() as replica:
        await load(replica, "sql", folder)
        assert [await cached(replica, "sql") for _ in range(2)] == [0, 32]
        await load(replica, "sql", folder, load_inplace=True)
        assert await cached(replica, "sql") == 32, "the same weights are the same adapter"
        write_adapter_files(folder, content=b"new")
        await text(replica, "/v1/unload_lora_adapter", {"lora_name": "sql"})
        await load(replica, "sql", folder)
        assert await cached(replica, "sql") == 0


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("tiny", {}, "adapter 'tiny': the name is empty or the model's own"),
        ("sql", {"use_dora": True}, "use_dora=True is not supported"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, name: str, change: dict[str, Any], problem: str
) -> None:
    folder = write_adapter_files(tmp_path / "odd", **change)
    async with running_replica() as replica:
        status, answer = await load(replica, name, folder)
        assert status == 400
        assert problem in answer
        status, answer = await load(replica, "gone", tmp_path / "gone")
        assert status == 400
        assert "adapter_config.json is missing" in answer


async def test_the_fleet_is_told_of_adapters_with_path_and_digest(tmp_path: Path) -> None:
    folder = write_adapter_files(tmp_path / "sql")
    async with running_replica() as replica:
        await load(replica, "sql", folder)
        (record,) = replica.front.adapters.records()
        assert record == ServedAdapter("sql", str(folder), record.digest)
        assert len(record.digest) == 64
