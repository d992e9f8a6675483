"""Tenants: whatever holds for a key holds on every route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from router.config import StaticReplica, TenantConfig, TenantKey
from router.tenancy.salt import cache_salt
from router.tenancy.tenants import TenantDirectory
from tests.conditions import until
from tests.router.fake_replica import Behaviour, FakeReplica, key_hash
from tests.router.running_gateway import chat, completion, gateway_spec, running_gateway

SALT_VECTOR = "cJxQUm-7c0nzivZnP2sLSg4zfWq3WZXzG4gb2P_7Ddw"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("hello"),
    "/v1/completions": completion("hello"),
    "/v1/responses": {"model": "tiny", "input": "hello"},
}
NARROW = TenantConfig(
    name="narrow",
    keys=(
        TenantKey(hash=key_hash("sk-narrow")),
        TenantKey(hash=key_hash("sk-blocked"), blocked=True),
        TenantKey(hash=key_hash("sk-expired"), expires_at=1.0),
    ),
    models=("other",),
)
WIDE = TenantConfig(name="wide", keys=(TenantKey(hash=key_hash("sk-wide")),), policy="round_robin")
REFUSALS = {
    "no key": (None, 401, "no API key was given"),
    "wrong key": ("sk-wrong", 401, "not known"),
    "blocked key": ("sk-blocked", 401, "blocked"),
    "expired key": ("sk-expired", 401, "expired"),
    "model of another tenant": ("sk-narrow", 404, "does not exist"),
}


@pytest.mark.fault("router-55")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_route_refuses_the_same_keys_and_models(path: str, stream: bool) -> None:
    async with running_gateway(gateway_spec(tenants=(NARROW, WIDE)), replicas=1) as running:
        for key, status, says in REFUSALS.values():
            got, answer, _ = await running.post(path, {**ROUTES[path], "stream": stream}, key=key)
            assert (got, says in answer["error"]["message"]) == (status, True), answer
        assert running.replicas[0].bodies == []


@pytest.mark.fault("router-55")
@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_applies_policy_salt_and_the_permit_of_its_tenant(path: str) -> None:
    spec = gateway_spec(tenants=(NARROW, WIDE), max_in_flight=1)
    async with running_gateway(spec, replicas=1) as running:
        (replica,) = running.replicas
        _, _, headers = await running.post(path, ROUTES[path], key="sk-wide")
        assert headers["x-prefixfleet-policy"] == "round_robin"
        sent = replica.bodies[-1]["prefixfleet"]
        salt = cache_salt(b"secret-of-the-fleet", "tenant/wide", None)
        assert (sent["tenant"], sent["cache_salt"]) == ("wide", salt)
        replica.behaviour = Behaviour(hold=asyncio.Event())
        first = asyncio.create_task(running.post(path, ROUTES[path], key="sk-wide"))
        await until(lambda: replica.num_running == 1)
        status, _, _ = await running.post(path, ROUTES[path], key="sk-wide")
        assert status == 429
        first.cancel()


async def test_the_model_list_shows_what_this_key_may_use() -> None:
    async with running_gateway(gateway_spec(tenants=(NARROW, WIDE)), replicas=1) as running:
        await running.client("sk-wide").models.list()
        for key, names in (("sk-wide", ["tiny"]), ("sk-narrow", [])):
            listed = await running.client(key).models.list()
            assert [model.id for model in listed.data] == names


async def test_a_gateway_without_tenants_serves_everybody_as_one() -> None:
    async with running_gateway(gateway_spec(tenants=()), replicas=1) as running:
        for key in (None, "whatever-an-openai-client-sends"):
            status, _, _ = await running.post("/v1/completions", completion("x"), key=key)
            assert status == 200
        assert running.replicas[0].bodies[-1]["prefixfleet"]["tenant"] == "default"


async def test_an_isolated_tenant_never_reaches_an_opaque_engine() -> None:
    opaque = FakeReplica("opaque")
    await opaque.start()
    shared = TenantConfig(
        name="all", keys=(TenantKey(hash=key_hash("sk-all")),), isolation="shared"
    )
    spec = gateway_spec(
        tenants=(WIDE, shared), replicas=(StaticReplica(url=opaque.url, kind="openai"),)
    )
    async with running_gateway(spec, with_index=False, replicas=0) as running:
        running.replicas.append(opaque)
        status, answer, _ = await running.post("/v1/completions", completion("x"), key="sk-wide")
        assert (status, answer["error"]["code"]) == (503, "no_available_replica")
        assert "only tenants with `isolation: shared`" in answer["error"]["message"]
        assert (await running.client("sk-wide").models.list()).data == []
        status, _, _ = await running.post("/v1/completions", completion("x"), key="sk-all")
        assert status == 200
        narrowed = completion("x", cache_salt="mine")
        status, _, _ = await running.post("/v1/completions", narrowed, key="sk-all")
        assert status == 503
        assert len(opaque.bodies) == 1


def test_the_salt_is_that_of_its_formula_and_differs_by_secret_group_and_client_salt() -> None:
    # base64url(HMAC-SHA256(b"s" * 16, bytes.fromhex("83 01 61 67 f6"))), by openssl.
    assert cache_salt(b"s" * 16, "g", None) == SALT_VECTOR
    others = {
        cache_salt(b"s" * 16, "g", None),
        cache_salt(b"t" * 16, "g", None),
        cache_salt(b"s" * 16, "h", None),
        cache_salt(b"s" * 16, "g", "null"),
        cache_salt(b"s" * 16, "gn", "ull"),
    }
    assert len(others) == 5


def test_groups_tenants_and_shared_can_not_collide() -> None:
    groups = {
        TenantConfig(name="acme").isolation_group,
        TenantConfig(name="x", isolation="acme").isolation_group,
        TenantConfig(name="shared").isolation_group,
        TenantConfig(name="x", isolation="shared").isolation_group,
    }
    assert groups == {"tenant/acme", "group/acme", "tenant/shared", "shared"}


def test_tenants_that_contradict_each_other_are_named() -> None:
    key = TenantKey(hash=key_hash("k"), alias="ci")
    with pytest.raises(ConfigError, match="the name 'a' is used twice"):
        TenantDirectory([TenantConfig(name="a"), TenantConfig(name="a")])
    with pytest.raises(ConfigError, match=r"'a' and 'b' hold the same key \(ci\)"):
        TenantDirectory([TenantConfig(name="a", keys=(key,)), TenantConfig(name="b", keys=(key,))])
    with pytest.raises(ConfigError, match="'a' and 'b' are both anonymous"):
        TenantDirectory(
            [TenantConfig(name="a", anonymous=True), TenantConfig(name="b", anonymous=True)]
        )
