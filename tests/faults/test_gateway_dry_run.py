"""A policy is tried on what a tenant's traffic really was, before it places anything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router.cli import main
from router.config import RecordConfig
from router.tenancy.dry_run import PolicyDryRun
from tests.router.recorded_traffic import DRY_RUN, NUM_SESSIONS, NUM_TURNS, converse, recorded
from tests.router.running_gateway import (
    ADMIN_KEY,
    GLOBEX_KEY,
    Running,
    completion,
    gateway_spec,
    running_gateway,
)

NUM_ROWS = NUM_TURNS * NUM_SESSIONS + 1


async def converse_all(running: Running) -> None:
    """Have one tenant converse, another say one thing, and wait for the record."""
    await converse(running)
    status, _, _ = await running.post(
        "/v1/completions", completion([9] * 40, max_tokens=2), key=GLOBEX_KEY
    )
    assert status == 200
    await recorded(running, NUM_ROWS)


@pytest.mark.fault("router-60")
async def test_a_policy_is_tried_on_recorded_traffic_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = gateway_spec(
        default_policy="round_robin", record=RecordConfig(path=str(tmp_path / "trace.jsonl"))
    )
    async with running_gateway(spec, replicas=3) as running:
        await converse_all(running)
        wanted = {"policy": "prefix_cost", "params": {}}
        status, answer = await running.admin(DRY_RUN, method="POST", body=wanted)
        assert status == 200, answer
        assert (answer["tenant"], answer["requests"]) == ("acme", NUM_TURNS * NUM_SESSIONS)
        assert answer["recorded_rows"] == NUM_ROWS
        assert answer["fleet"] == {"replicas": 3, "blocks": 4096}
        now, then = answer["now"], answer["then"]
        assert (now["policy"], then["policy"]) == ("round_robin", "prefix_cost")
        # Of 2 to 12 blocks of a session all but the newest two are known where it was before. The
        # times are those of this run: on a crowded machine a session may have had to move once, and
        # then computes up to ten blocks anew.
        assert 20 / 42 <= then["token_hit"] <= 30 / 42 + 1e-9
        assert now["token_hit"] < then["token_hit"] - 0.1
        assert now["ttft_p99_s"] > 0
        assert 1 / 3 <= then["busiest_share"] <= 1
        _, shown = await running.admin("/admin/tenants/acme")
        assert shown["tenant"]["policy"] is None

        words = ["policy", "dry-run", "acme", "prefix_cost", "--admin-url", running.admin_url]
        words += ["--admin-key", ADMIN_KEY]
        assert await asyncio.to_thread(main, words) == 0
        text = capsys.readouterr().out
        assert "24 requests of acme, 25 of all, on 3 replicas of 4096 blocks" in text
        assert await asyncio.to_thread(main, [*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["then"] == then


async def test_what_cannot_be_tried_is_said(tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "trace.jsonl"))
    async with running_gateway(gateway_spec(record=record), replicas=1) as running:

        async def refused(body: object, path: str = DRY_RUN) -> tuple[int, str]:
            status, answer = await running.admin(path, method="POST", body=body)
            return status, answer["error"]["message"]

        assert await refused({"policy": "round_robin"}) == (
            422,
            "nothing has been recorded yet; let some traffic pass first",
        )
        status, message = await refused({"policy": "fastest"})
        assert (status, "fastest" in message) == (422, True)
        status, message = await refused({"policy": "round_robin", "parameters": {}})
        assert (status, "parameters" in message) == (400, True)
        nobody = "/admin/tenants/nobody/policy/dry-run"
        assert await refused({"policy": "round_robin"}, nobody) == (404, "no tenant 'nobody'")
    async with running_gateway(replicas=1) as running:
        assert await refused({"policy": "round_robin"}) == (
            422,
            "this gateway records nothing; set router.record",
        )


async def test_a_replay_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "trace.jsonl"))
    async with running_gateway(gateway_spec(record=record), replicas=1) as running:
        await converse_all(running)
        running.gateway.dry_run = PolicyDryRun(timeout_s=0.01)
        body = {"policy": "round_robin", "params": {}}
        status, answer = await running.admin(DRY_RUN, method="POST", body=body)
        assert (status, answer["error"]["message"]) == (422, "the replay took longer than 0.01 s")
