"""The command line over the admin API: tenants, keys, usage, policies."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from typing import Any

import pytest

from router.cli import main
from tests.router.running_gateway import (
    ADMIN_KEY,
    Running,
    completion,
    gateway_spec,
    running_gateway,
)


class Shell:
    """Runs commands against one gateway and keeps what they print."""

    def __init__(
        self, running: Running, capsys: pytest.CaptureFixture[str], *, key: str = ADMIN_KEY
    ) -> None:
        self._options = ["--admin-url", running.admin_url, "--admin-key", key]
        self._capsys = capsys

    async def run(self, *words: str) -> tuple[int, str]:
        """Return exit code and output of a command, standard error after standard output."""
        code = await asyncio.to_thread(main, [*words, *self._options])
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err

    async def json(self, *words: str) -> Any:
        """Return what a command prints with `--json`."""
        code, text = await self.run(*words, "--json")
        assert code == 0, text
        return json.loads(text)


async def test_tenants_and_keys_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=1) as running:
        shell = Shell(running, capsys)
        words = ("--requests-per-minute", "60", "--alias", "gpt-4=tiny", "--model", "tiny")
        code, text = await shell.run("tenant", "create", "acme", *words)
        assert (code, "limits.requests_per_minute" in text) == (0, True)
        code, text = await shell.run("key", "create", "acme", "ci", "--owner", "ada")
        key = text.splitlines()[0]
        assert (code, text.splitlines()[1]) == (0, "(of acme, alias ci; it is not shown again)")
        assert (await running.post("/v1/completions", completion("x"), key=key))[0] == 200
        assert await shell.run("key", "block", "acme", "ci") == (0, "acme: ci is blocked\n")
        assert (await running.post("/v1/completions", completion("x"), key=key))[0] == 401
        assert await shell.run("key", "unblock", "acme", "ci") == (0, "acme: ci is not blocked\n")
        made = await shell.json("key", "rotate", "acme", "ci", "--grace-hours", "0")
        assert (await running.post("/v1/completions", completion("x"), key=key))[0] == 401
        assert (await running.post("/v1/completions", completion("x"), key=made["key"]))[0] == 200
        listed = await shell.json("key", "list", "acme")
        assert [entry["alias"] for entry in listed if entry["expires_at"] is None] == ["ci"]
        update = ("tenant", "update", "acme", "--requests-per-minute", "none", "--model", "all")
        changed = await shell.json(*update)
        assert changed["tenant"]["limits"]["requests_per_minute"] is None
        assert changed["tenant"]["models"] is None
        assert (await shell.run("tenant", "list"))[0] == 0
        assert await shell.run("tenant", "delete", "acme") == (
            0,
            "acme: deleted, with all its keys\n",
        )
        assert await shell.run("tenant", "show", "acme") == (
            1,
            "prefixfleet: there is no tenant 'acme'\n",
        )


async def test_mistakes_on_the_command_line_name_the_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=0) as running:
        shell = Shell(running, capsys)
        assert await shell.run("tenant", "create", "acme", "--tokens-per-day", "lots") == (
            2,
            "prefixfleet: --tokens-per-day: a whole number above 0 or `none`, not 'lots'\n",
        )
        code, text = await shell.run("key", "create", "acme", "ci", "--expires", "soon")
        assert (code, text) == (
            2,
            "prefixfleet: --expires: a day such as 2026-12-31, not 'soon'\n",
        )
        assert await shell.run("key", "create", "acme", "ci", "--expires", "2020-01-01") == (
            2,
            "prefixfleet: --expires 2020-01-01: that day is over\n",
        )
        assert await shell.run("key", "rotate", "acme", "ci", "--grace-hours", "-1") == (
            2,
            "prefixfleet: --grace-hours -1: from 0 to 2160\n",
        )
        stranger = Shell(running, capsys, key="sk-wrong")
        assert await stranger.run("tenant", "create", "acme") == (
            2,
            "prefixfleet: this needs an admin key of the fleet: --admin-key, or the variable "
            "PREFIXFLEET_ADMIN_KEY\n",
        )
        code, text = await shell.run("tenant", "update", "acme")
        assert (code, "nothing to change" in text) == (2, True)


async def test_usage_is_exported_as_json_lines_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_gateway(replicas=1) as running:
        shell = Shell(running, capsys)
        for i in range(3):
            await running.post("/v1/completions", completion(f"{i}" * 10))
        await running.gateway.background.drain(timeout_s=5)
        code, text = await shell.run("usage", "export")
        records = [json.loads(line) for line in text.splitlines()]
        assert [(r["tenant"], r["uncached_tokens"], r["output_tokens"]) for r in records] == [
            ("acme", 11, 3)
        ] * 3
        code, text = await shell.run("usage", "export", "--format", "csv", "--tenant", "acme")
        rows = list(csv.DictReader(io.StringIO(text)))
        assert (code, len(rows), rows[0]["charged_tokens"]) == (0, 3, "14")
        totals = await shell.json("usage", "show", "--tenant", "acme")
        assert [(t["requests"], t["charged_tokens"]) for t in totals] == [(3, 42)]
        assert (await shell.run("usage", "export", "--tenant", "globex"))[1] == ""


async def test_a_policy_is_bound_to_a_tenant_from_its_next_request_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=1) as running:
        shell = Shell(running, capsys)
        await shell.json("tenant", "create", "acme")
        key = (await shell.json("key", "create", "acme", "ci"))["key"]
        _, _, before = await running.post("/v1/completions", completion("x"), key=key)
        code, text = await shell.run("policy", "set", "acme", "least_load")
        assert (code, text) == (0, "acme: placed by least_load\n")
        _, _, after = await running.post("/v1/completions", completion("x"), key=key)
        policies = [h["x-prefixfleet-policy"] for h in (before, after)]
        assert policies == ["prefix_cost", "least_load"]
        listed = await shell.json("policy", "list")
        assert {row["policy"]: row["tenants"] for row in listed}["least_load"] == "acme"
        assert [row["policy"] for row in listed if row["default"]] == ["prefix_cost"]
        code, text = await shell.run("policy", "set", "acme", "nearest")
        assert (code, "no policy 'nearest'" in text) == (2, True)
        assert (await shell.run("policy", "set", "acme", "default"))[0] == 0


async def test_admin_keys_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_gateway(replicas=0) as running:
        shell = Shell(running, capsys)
        code, text = await shell.run("admin", "create", "lead", "tenant-admin", "--tenant", "acme")
        key, note = text.splitlines()
        assert (code, note) == (0, "(alias lead, tenant-admin; it is not shown again)")
        assert (await running.admin("/admin/tenants/acme", key=key))[0] == 200
        assert (await running.admin("/admin/tenants/globex", key=key))[0] == 403
        (listed,) = await shell.json("admin", "list")
        assert (listed["alias"], listed["role"], listed["tenant"], listed["key"]) == (
            *("lead", "tenant-admin", "acme"),
            None,
        )
        assert await shell.run("admin", "delete", "lead") == (0, "lead: deleted\n")
        assert (await running.admin("/admin/tenants/acme", key=key))[0] == 401
        code, text = await shell.run("admin", "create", "x", "tenant-admin")
        assert (code, "a tenant-admin needs one" in text) == (2, True)
