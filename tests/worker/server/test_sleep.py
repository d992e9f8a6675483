"""A replica that sleeps takes nothing, says so, and goes on as before when it wakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.engine.frontend.tiny_tokenizer import write_model_folder
from tests.worker.server.replica import RunningReplica, running_replica, until
from worker.server.registration import load_report

PROMPT = list(range(40))
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": 6,
    "ignore_eos": True,
    "temperature": 0,
}


async def complete(replica: RunningReplica, **fields: Any) -> tuple[str, int]:
    """Run PROMPT: its text, and how much of it was cached."""
    status, answer = await replica.post("/v1/completions", {**BODY, **fields})
    assert status == 200, answer
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


@pytest.mark.parametrize("level", [1, 2])
async def test_the_same_prompt_has_the_same_answer_after_a_sleep_and_no_hit(level: int) -> None:
    async with running_replica() as replica:
        before, _ = await complete(replica)
        assert (await complete(replica))[1] == 32
        assert await replica.post(f"/sleep?level={level}", {}) == (200, {"is_sleeping": True})
        assert await replica.get("/is_sleeping") == (200, {"is_sleeping": True})
        assert await replica.post("/wake_up", {}) == (200, {"is_sleeping": False})
        assert await complete(replica) == (before, 0)


async def test_a_sleeping_replica_refuses_and_says_so_everywhere() -> None:
    async with running_replica() as replica:
        await replica.post("/sleep", {})
        status, answer = await replica.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "sleeping")
        status, health = await replica.get("/health")
        assert (status, health["status"]) == (503, "sleeping")
        assert health["reason"] == "this replica sleeps at level 1"
        assert load_report(replica.front, replica.client).draining
        await replica.post("/wake_up", {})
        assert (await replica.get("/health"))[0] == 200
        assert not load_report(replica.front, replica.client).draining


async def test_a_request_that_runs_when_it_falls_asleep_ends_after_waking() -> None:
    async with running_replica(step_s=0.01) as replica:
        expected, _ = await complete(replica, max_tokens=50)
        running = asyncio.create_task(complete(replica, max_tokens=50))
        await until(lambda: bool(replica.core.scheduler.running))
        await replica.post("/sleep", {})
        assert not running.done()
        await replica.post("/wake_up", {})
        text, _ = await running
        assert text == expected


async def test_other_weights_have_another_digest_and_hit_nothing(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "new")
    async with running_replica() as replica:
        before, _ = await complete(replica)
        digest = replica.client.info.execution_digest
        status, answer = await replica.post("/update_weights", {"path": str(folder)})
        assert (status, answer["success"]) == (200, True)
        assert replica.client.info.execution_digest == answer["execution_digest"] != digest
        after, cached = await complete(replica)
        assert (after != before, cached) == (True, 0)


async def test_a_folder_with_another_tokenizer_or_none_is_refused(tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other")
    (other / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    async with running_replica() as replica:
        status, answer = await replica.post("/update_weights", {"path": str(other)})
        assert (status, answer["error"]["param"]) == (400, "path")
        status, answer = await replica.post("/update_weights", {"path": str(tmp_path / "none")})
        assert (status, answer["error"]["param"]) == (400, "path")
        status, answer = await replica.post("/update_weights", {})
        assert (status, answer["error"]["param"]) == (400, "path")
        assert (await complete(replica))[1] == 0


async def test_a_level_that_does_not_exist_is_refused() -> None:
    async with running_replica() as replica:
        status, answer = await replica.post("/sleep?level=3", {})
        assert (status, answer["error"]["param"]) == (400, "level")
        assert await replica.get("/is_sleeping") == (200, {"is_sleeping": False})
