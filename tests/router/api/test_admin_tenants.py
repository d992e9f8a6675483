"""The admin API of tenants and keys: what it makes, shows, refuses, writes down, and to whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.running_gateway import (
    ADMIN_KEY,
    Running,
    completion,
    gateway_spec,
    running_gateway,
)
from tests.router.tenancy.fleet import made, make_tenant, tenant

TENANTS, KEYS = "/admin/tenants", "/admin/tenants/acme/keys"


async def refused(
    running: Running, path: str, *, method: str = "POST", body: Any = None, key: str = ADMIN_KEY
) -> tuple[int, str | None, str]:
    """Return status, code and message of a call that is refused."""
    status, answer = await running.admin(path, method=method, body=body, key=key)
    return status, answer["error"]["code"], answer["error"]["message"]


async def test_a_tenant_is_made_shown_changed_and_removed() -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=0) as running:
        asked = {"name": "acme", "models": ["tiny"], "limits": {"tokens_per_day": 1000}}
        shown = await made(running, TENANTS, asked)
        assert (shown["declared"], shown["keys"]) == (False, [])
        assert shown["tenant"]["limits"]["tokens_per_day"] == 1000
        patch = {"models": None, "limits": {"requests_per_minute": 5}, "weight": 2.5}
        status, changed = await running.admin(f"{TENANTS}/acme", method="PATCH", body=patch)
        assert (status, changed["tenant"]["models"], changed["tenant"]["weight"]) == (
            200,
            None,
            2.5,
        )
        assert changed["tenant"]["limits"] == {
            "requests_per_minute": 5,
            "tokens_per_minute": None,
            "max_parallel": None,
            "tokens_per_day": 1000,
            "tokens_per_month": None,
            "soft_limit": 0.8,
        }
        status, answer = await running.admin(f"{TENANTS}/acme", method="DELETE")
        assert (status, answer) == (200, {"deleted": "acme"})
        assert await refused(running, f"{TENANTS}/acme", method="GET") == (
            404,
            "not_found",
            "there is no tenant 'acme'",
        )


async def test_a_key_is_shown_once_and_stored_as_a_hash() -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=0) as running:
        await made(running, TENANTS, {"name": "acme"})
        answer = await made(running, KEYS, {"alias": "ci", "owner": "ada"})
        assert answer["key"].startswith("sk-")
        assert len(answer["key"]) == 46
        for path in (TENANTS, f"{TENANTS}/acme", KEYS, "/admin/audit"):
            _, text = await running.admin(path)
            assert answer["key"] not in str(text)
        _, listed = await running.admin(KEYS)
        (key,) = listed["keys"]
        assert (key["alias"], key["owner"], key["key"]) == ("ci", "ada", None)
        assert answer["id"] == key["id"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (TENANTS, {"name": "acme"}, 409, "the tenant 'acme' exists already"),
        (TENANTS, {"name": "globex"}, 409, "the tenant 'globex' exists already"),
        (
            TENANTS,
            {"name": "a b"},
            400,
            "name: expected a name (1 to 64 of a-z A-Z 0-9",
        ),
        (TENANTS, {}, 400, "name: is required"),
        (TENANTS, {"name": "x", "wieght": 1}, 400, "wieght"),
        (TENANTS, {"name": "x", "limits": {"tokens_per_day": 0}}, 400, "limits.tokens_per_day: "),
        (TENANTS, {"name": "x", "policy": "nearest"}, 400, "no policy 'nearest'"),
        (TENANTS, {"name": "x", "anonymous": True}, 400, "anonymous: declare it in the conf"),
        (TENANTS, {"name": "x", "keys": [{"hash": "0" * 64}]}, 400, "keys: add keys one by one"),
        (KEYS, {"alias": "ci"}, 409, "the tenant 'acme' has a key 'ci' already"),
        (KEYS, {"alias": "x", "hash": "abc"}, 400, "hash: "),
        (f"{TENANTS}/nobody/keys", {"alias": "x"}, 404, "there is no tenant 'nobody'"),
        (f"{KEYS}/nope/block", None, 404, "'nope' is no key of the tenant 'acme'"),
        (f"{KEYS}/ci/rotate", {"grace_s": -1}, 400, "grace_s: "),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    path: str, body: Any, status: int, says: str
) -> None:
    async with running_gateway(gateway_spec(tenants=(tenant("globex"),)), replicas=0) as running:
        await make_tenant(running)
        got, _, message = await refused(running, path, body=body)
        assert (got, says in message) == (status, True), message


async def test_names_and_hashes_cannot_be_changed() -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=0) as running:
        await make_tenant(running)
        for path, patch in ((f"{TENANTS}/acme", {"name": "b"}), (f"{KEYS}/ci", {"hash": "0" * 64})):
            status, _, message = await refused(running, path, method="PATCH", body=patch)
            assert (status, "cannot be changed" in message) == (400, True)


async def test_roles_allow_what_they_are_for_and_no_more() -> None:
    async with running_gateway(gateway_spec(tenants=(tenant("globex"),)), replicas=0) as running:
        await make_tenant(running)
        admins = "/admin/admins"
        viewer = (await made(running, admins, {"alias": "eye", "role": "viewer"}))["key"]
        asked = {"alias": "lead", "role": "tenant-admin", "tenant": "acme"}
        lead = (await made(running, admins, asked))["key"]
        block, globex = f"{KEYS}/ci/block", f"{TENANTS}/globex"
        calls = [
            ("GET", TENANTS, 200, 403),
            ("GET", f"{TENANTS}/acme", 200, 200),
            ("GET", globex, 200, 403),
            ("GET", KEYS, 200, 200),
            ("GET", f"{globex}/keys", 200, 403),
            ("POST", block, 403, 200),
            ("POST", f"{globex}/keys/ci/block", 403, 403),
            ("PATCH", f"{TENANTS}/acme", 403, 403),
            ("DELETE", f"{TENANTS}/acme", 403, 403),
            ("GET", "/admin/usage", 200, 200),
            ("GET", "/admin/audit", 200, 403),
            ("GET", "/admin/admins", 200, 403),
            ("POST", "/admin/admins", 403, 403),
            ("POST", "/admin/config/reload", 403, 403),
            ("GET", "/admin/replicas", 200, 403),
            # Routes that change nothing, without the body that they take.
            ("POST", "/admin/index/explain", 400, 403),
            ("POST", f"{TENANTS}/acme/policy/dry-run", 400, 400),
            ("POST", f"{globex}/policy/dry-run", 400, 403),
            ("DELETE", f"{KEYS}/x%2Fpolicy%2Fdry-run", 403, 404),
        ]
        for method, path, for_viewer, for_lead in calls:
            for key, expected in ((viewer, for_viewer), (lead, for_lead)):
                status, _ = await running.admin(path, method=method, key=key)
                assert status == expected, (method, path)
        await running.admin(f"{admins}/eye", method="DELETE")
        assert (await running.admin(TENANTS, key=viewer))[0] == 401


async def test_every_call_that_may_change_something_is_audited_refused_ones_too() -> None:
    async with running_gateway(gateway_spec(tenants=(tenant("globex"),)), replicas=0) as running:
        await make_tenant(running)
        await running.admin(f"{TENANTS}/acme", method="PATCH", body={"weight": 3.0})
        await running.admin(f"{TENANTS}/globex", method="DELETE")
        await running.admin(TENANTS)
        _, answer = await running.admin("/admin/audit")
        records = answer["records"]
        assert [(r["action"], r["status"], r["actor"]) for r in records] == [
            ("DELETE /admin/tenants/globex", 409, "fleet"),
            ("PATCH /admin/tenants/acme", 200, "fleet"),
            ("POST /admin/tenants/acme/keys", 201, "fleet"),
            ("POST /admin/tenants", 201, "fleet"),
        ]
        changed = records[1]
        assert (changed["before"]["weight"], changed["after"]["weight"]) == (1.0, 3.0)


async def test_usage_is_shown_to_its_key_and_to_admins() -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=1) as running:
        key = await make_tenant(running, limits={"tokens_per_day": 1000})
        other = (await made(running, KEYS, {"alias": "other"}))["key"]
        body = completion("x" * 20, user="u-1")
        await running.post("/v1/completions", body, key=key)
        await running.gateway.background.drain(timeout_s=5)
        async with running.session.get(
            f"{running.url}/v1/usage", headers={"authorization": f"Bearer {key}"}
        ) as response:
            own = await response.json()
        assert (own["tenant"], own["key"]) == ("acme", "ci")
        assert own["limits"][0]["tokens_today"] == 24
        (total,) = own["totals"]
        assert (total["requests"], total["uncached_tokens"], total["output_tokens"]) == (1, 21, 3)
        async with running.session.get(
            f"{running.url}/v1/usage", headers={"authorization": f"Bearer {other}"}
        ) as response:
            assert (await response.json())["totals"] == []
        _, answer = await running.admin("/admin/usage?tenant=acme")
        assert [t["charged_tokens"] for t in answer["totals"]] == [24]
        assert (await running.admin("/admin/usage?tenant=globex"))[1] == {"totals": []}
        _, answer = await running.admin("/admin/usage/records")
        (record,) = answer["records"]
        assert (record["outcome"], record["status"], record["user"]) == ("ok", 200, "u-1")
        assert 0 <= record["queue_s"] <= record["ttft_s"] <= record["duration_s"]
        assert await refused(running, "/admin/usage?since=yesterday", method="GET") == (
            400,
            None,
            "since: a day such as 2026-11-29, not 'yesterday'",
        )
