"""What the admin API of one gateway changes holds for the next request on every other."""

from __future__ import annotations

import asyncio

import pytest

from tests.redis_server import RedisServer
from tests.router.fake_replica import key_hash
from tests.router.running_gateway import Running, completion
from tests.router.tenancy.fleet import made, make_tenant, tenant, two_gateways

KEYS = "/admin/tenants/acme/keys"


async def status_of(running: Running, key: str, model: str = "tiny") -> tuple[int, str]:
    """Return the status of one completion, and what the refusal says."""
    status, answer, _ = await running.post("/v1/completions", completion("x", model=model), key=key)
    return status, answer.get("error", {}).get("message", "")


@pytest.mark.fault("router-54")
async def test_a_blocked_key_is_refused_by_the_next_request_on_every_gateway(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        key = await make_tenant(one)
        for gateway in (one, other):
            assert await status_of(gateway, key) == (200, "")
        await one.admin(f"{KEYS}/ci/block", method="POST")
        for gateway in (other, one):
            assert await status_of(gateway, key) == (401, "this API key is blocked")
        await other.admin(f"{KEYS}/ci/unblock", method="POST")
        for gateway in (one, other):
            assert await status_of(gateway, key) == (200, "")


@pytest.mark.fault("router-54")
async def test_so_are_deleted_keys_blocked_tenants_and_lost_models(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        key = await make_tenant(one)
        assert await status_of(other, key) == (200, "")
        await one.admin("/admin/tenants/acme", method="PATCH", body={"blocked": True})
        assert await status_of(other, key) == (401, "the tenant of this API key is blocked")
        await one.admin("/admin/tenants/acme", method="PATCH", body={"blocked": False})
        assert await status_of(other, key) == (200, "")
        await one.admin("/admin/tenants/acme", method="PATCH", body={"models": ["big"]})
        assert await status_of(other, key) == (404, "the model 'tiny' does not exist")
        await one.admin("/admin/tenants/acme", method="PATCH", body={"models": None})
        assert await status_of(other, key) == (200, "")
        await one.admin(f"{KEYS}/ci", method="DELETE")
        assert await status_of(other, key) == (401, "this API key is not known here")


async def test_a_rotated_key_works_beside_the_new_one_for_its_grace(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        old = await make_tenant(one)
        new = (await made(one, f"{KEYS}/ci/rotate", {"grace_s": 600}))["key"]
        for key in (old, new):
            assert await status_of(other, key) == (200, "")
        newest = (await made(one, f"{KEYS}/ci/rotate", {"grace_s": 0}))["key"]
        assert await status_of(other, new) == (401, "this API key has expired")
        assert await status_of(other, newest) == (200, "")


async def test_a_changed_limit_holds_for_the_next_request_elsewhere(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        key = await make_tenant(one)
        for _ in range(2):
            assert await status_of(other, key) == (200, "")
        patch = {"limits": {"requests_per_minute": 1}}
        await one.admin(f"{KEYS}/ci", method="PATCH", body=patch)
        assert await status_of(other, key) == (200, "")
        status, says = await status_of(other, key)
        assert (status, says[:41]) == (429, "this key may use 1 requests per minute; t")


async def test_keys_can_be_added_to_a_declared_tenant_and_its_settings_cannot_be_changed(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis, tenant()) as (one, other):
        answer = await made(one, KEYS, {"alias": "second", "owner": "ada"})
        assert await status_of(other, answer["key"]) == (200, "")
        status, refused = await one.admin(
            "/admin/tenants/acme", method="PATCH", body={"weight": 2.0}
        )
        assert (status, refused["error"]["code"]) == (409, "conflict")
        assert "is declared in the configuration" in refused["error"]["message"]
        status, refused = await one.admin(f"{KEYS}/ci/block", method="POST")
        assert (status, refused["error"]["code"]) == (409, "conflict")
        status, _ = await one.admin(f"{KEYS}/second/block", method="POST")
        assert status == 200


async def test_a_key_of_another_system_is_taken_over_by_its_hash(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis, tenant("globex")) as (one, other):
        await made(one, "/admin/tenants", {"name": "acme"})
        taken = await made(one, KEYS, {"alias": "old", "hash": key_hash("sk-of-old")})
        assert taken["key"] is None
        assert await status_of(other, "sk-of-old") == (200, "")
        again = {"alias": "stolen", "hash": key_hash("sk-of-old")}
        status, refused = await one.admin(KEYS, method="POST", body=again)
        assert (status, refused["error"]["message"]) == (409, "a tenant holds this key already")


async def test_the_model_list_is_what_this_key_may_use_at_this_moment(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        key = await make_tenant(one, aliases={"gpt-4": "tiny", "gone": "not-served"})
        assert [m.id for m in (await other.client(key).models.list()).data] == ["gpt-4", "tiny"]
        assert await status_of(other, key, "gpt-4") == (200, "")
        assert other.replicas[0].bodies[-1]["model"] == "tiny"
        assert (await status_of(other, key, "gone"))[0] == 404
        await one.admin(f"{KEYS}/ci", method="PATCH", body={"models": ["gpt-4"]})
        assert [m.id for m in (await other.client(key).models.list()).data] == ["gpt-4"]
        assert await status_of(other, key, "tiny") == (404, "the model 'tiny' does not exist")
        assert await status_of(other, key, "gpt-4") == (200, "")


@pytest.mark.fault("router-54")
async def test_a_blocked_key_sees_neither_models_nor_usage_anywhere(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        headers = {"authorization": f"Bearer {await make_tenant(one)}"}
        for path in ("/v1/models", "/v1/models/tiny", "/v1/usage"):
            async with other.session.get(other.url + path, headers=headers) as response:
                assert response.status == 200
        await one.admin(f"{KEYS}/ci/block", method="POST")
        for path in ("/v1/models", "/v1/models/tiny", "/v1/usage"):
            async with other.session.get(other.url + path, headers=headers) as response:
                assert response.status == 401


async def test_an_admin_key_that_is_removed_is_refused_at_once_elsewhere(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        viewer = (await made(one, "/admin/admins", {"alias": "eye", "role": "viewer"}))["key"]
        assert (await other.admin("/admin/tenants", key=viewer))[0] == 200
        await one.admin("/admin/admins/eye", method="DELETE")
        assert (await other.admin("/admin/tenants", key=viewer))[0] == 401


async def test_changes_made_at_once_on_two_gateways_are_all_kept(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        await make_tenant(one)
        answers = await asyncio.gather(
            *(
                (one, other)[i % 2].admin(
                    "/admin/tenants/acme", method="PATCH", body={"aliases": {f"a{i}": "tiny"}}
                )
                for i in range(12)
            )
        )
        assert [status for status, _ in answers] == [200] * 12
        _, shown = await other.admin("/admin/tenants/acme")
        assert sorted(shown["tenant"]["aliases"]) == sorted(f"a{i}" for i in range(12))
