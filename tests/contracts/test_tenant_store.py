"""What every store of tenants must do, whether in memory, in Redis or in Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis

from kvindex.redis_connect import connect
from router.config import Limits, TenantConfig, TenantKey
from router.tenancy.memory_store import MemoryTenantStore
from router.tenancy.redis_state import PREFIX
from router.tenancy.redis_store import RedisTenantStore
from router.tenancy.stored import (
    AuditRecord,
    StaleDirectory,
    StoredAdmin,
    StoredDirectory,
    StoredKey,
    TenantStore,
    Write,
)
from tests.redis_server import RedisServer

ACME = TenantConfig(name="acme", limits=Limits(tokens_per_day=7), aliases={"a": "tiny"})
KEY = StoredKey(tenant="acme", key=TenantKey(hash="0" * 64, alias="ci"), created_at=1.5)
ADMIN = StoredAdmin(hash="1" * 64, alias="eye", role="viewer", created_at=2.5)
FULL = StoredDirectory(generation="g", version=3, tenants=(ACME,), keys=(KEY,), admins=(ADMIN,))


@pytest.fixture(params=["memory", "redis", "valkey"])
async def store(
    request: pytest.FixtureRequest, shared_redis: RedisServer, shared_valkey: RedisServer
) -> AsyncIterator[TenantStore]:
    if request.param == "memory":
        yield MemoryTenantStore()
        return
    server = shared_valkey if request.param == "valkey" else shared_redis
    redis = connect(server.url)
    await _forget(redis)
    yield RedisTenantStore(redis)
    await _forget(redis)
    await redis.aclose()


async def _forget(redis: Redis) -> None:
    names = ("head", "tenants", "keys", "admins", "audit")
    await redis.delete(*(f"{PREFIX}{name}" for name in names))


async def test_an_empty_store_has_no_mark_and_takes_no_change(store: TenantStore) -> None:
    assert (await store.mark(), await store.load()) == ("", None)
    with pytest.raises(StaleDirectory):
        await store.change([Write("tenants", "acme", ACME)], mark="")
    assert await store.load() is None


async def test_what_is_restored_is_what_is_loaded(store: TenantStore) -> None:
    assert await store.restore(FULL)
    assert (await store.mark(), await store.load()) == ("g:3", FULL)


async def test_changes_are_made_together_and_raise_the_version(store: TenantStore) -> None:
    await store.restore(StoredDirectory(generation="g", version=0))
    writes = [Write("tenants", "acme", ACME), Write("keys", KEY.key.hash, KEY)]
    await store.change([*writes, Write("admins", ADMIN.hash, ADMIN)], mark="g:0")
    assert await store.load() == msgspec.structs.replace(FULL, version=1)
    await store.change([Write("keys", KEY.key.hash, None)], mark="g:1")
    assert await store.load() == msgspec.structs.replace(FULL, version=2, keys=())


async def test_a_change_of_an_older_directory_changes_nothing(store: TenantStore) -> None:
    await store.restore(FULL)
    for mark in ("g:2", "other:3"):
        with pytest.raises(StaleDirectory):
            await store.change([Write("tenants", "acme", None)], mark=mark)
    assert await store.load() == FULL


async def test_only_a_newer_state_of_the_same_generation_replaces_another(
    store: TenantStore,
) -> None:
    await store.restore(FULL)
    older = StoredDirectory(generation="g", version=2)
    stranger = StoredDirectory(generation="h", version=9)
    assert [await store.restore(other) for other in (FULL, older, stranger)] == [False] * 3
    newer = StoredDirectory(generation="g", version=4, tenants=(ACME,))
    assert await store.restore(newer)
    assert await store.load() == newer


async def test_the_audit_log_gives_the_newest_first(store: TenantStore) -> None:
    records = [
        AuditRecord(
            at=float(i),
            request_id=f"r{i}",
            actor="fleet",
            role="admin",
            action="POST /admin/tenants",
            status=201,
            after={"name": "acme"},
        )
        for i in range(3)
    ]
    for record in records:
        await store.audit(record)
    assert await store.audits(limit=2) == [records[2], records[1]]
