"""The state store for a user with the least rights that the operations page names."""

from __future__ import annotations

import math
import time
import uuid

import pytest

from kvindex.foundation.clock import SystemClock, VirtualClock
from kvindex.foundation.errors import DependencyError
from kvindex.redis_connect import connect
from router.config import Limits, TenantConfig
from router.tenancy.limits import Claim, Scope, Settlement, Spent
from router.tenancy.periods import periods_at
from router.tenancy.redis_limiter import RedisLimiter
from router.tenancy.redis_store import RedisTenantStore
from router.tenancy.redis_usage import RedisUsageLog
from router.tenancy.stored import AuditRecord, StoredDirectory, Write
from router.tenancy.stores import check_state_server
from router.tenancy.usage import UsageRecord
from tests.kvindex.test_index_deployments import call, documented_acl
from tests.redis_server import RedisServer, running_server, valkey_binary

ACME = TenantConfig(name="acme")
USAGE = UsageRecord(
    at=time.time(),
    request_id="r",
    tenant="acme",
    key="ci",
    model="tiny",
    uncached_tokens=5,
    cached_tokens=0,
    output_tokens=2,
    charged_tokens=7,
    queue_s=0.1,
    ttft_s=0.2,
    duration_s=0.3,
    status=200,
    outcome="ok",
)


@pytest.mark.parametrize("binary", [None, valkey_binary()], ids=["redis", "valkey"])
async def test_the_documented_rights_suffice_for_tenants_limits_and_usage(
    binary: str | None,
) -> None:
    with running_server(binary) as server:
        admin = connect(server.url)
        await call(admin, "ACL", "SETUSER", *documented_acl())
        redis = connect(server.url.replace("redis://", "redis://prefixfleet:PASSWORD@"))
        limiter = RedisLimiter(redis, gateway="g", clock=VirtualClock(USAGE.at))  # one day
        store, usage = RedisTenantStore(redis), RedisUsageLog(redis)
        assert await limiter.heartbeat(lease_s=60) == (1, False)
        scope = Scope("tenant/acme", Limits(tokens_per_minute=10, max_parallel=1))
        claim = Claim(id="r", scopes=(scope,), num_tokens=9)
        assert (await limiter.reserve(claim)).hit is None
        await limiter.settle(Settlement(id="r", scopes=(scope.name,), num_tokens=7, usage=USAGE))
        day = periods_at(USAGE.at).day
        await limiter.recall([Spent(scope.name, "day", day, 100)])
        (use,) = await limiter.uses([scope.name])
        assert (use.num_tokens, use.day_tokens, use.num_running) == (7, 100, 0)
        await store.restore(StoredDirectory(generation="g", version=1))
        await store.change([Write("tenants", "acme", ACME)], mark=await store.mark())
        loaded = await store.load()
        assert loaded is not None
        assert (loaded.version, loaded.tenants) == (2, (ACME,))
        audit = AuditRecord(
            at=1.0, request_id="r", actor="fleet", role="admin", action="POST /", status=201
        )
        await store.audit(audit)
        assert await store.audits(limit=9) == [audit]
        assert (await usage.page(after=None, since=0.0, limit=9)).records == [USAGE]
        assert [total.charged_tokens for total in await usage.totals([day])] == [7]
        await limiter.close()
        await admin.aclose()


async def test_records_are_read_page_by_page() -> None:
    with running_server() as server:
        redis = connect(server.url)
        limiter = RedisLimiter(redis, gateway="g", clock=SystemClock())
        usage = RedisUsageLog(redis)
        for i in range(5):
            await limiter.settle(
                Settlement(id=f"{i}", scopes=("tenant/acme",), num_tokens=7, usage=USAGE)
            )
        sizes, after = [], None
        while True:
            page = await usage.page(after=after, since=0.0, limit=2)
            sizes.append(len(page.records))
            after = page.next
            if after is None:
                break
        assert sizes == [2, 2, 1]
        await limiter.close()


async def test_a_server_that_may_evict_keys_is_refused_and_one_that_is_away_waited_for() -> None:
    with running_server() as server:
        redis = connect(server.url)
        await check_state_server(redis)
        await call(redis, "CONFIG", "SET", "maxmemory", "100mb")
        await call(redis, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(DependencyError, match="may evict our keys"):
            await check_state_server(redis)
        server.kill()
        await check_state_server(redis)
        await redis.aclose()


async def test_what_an_older_gateway_counts_is_seen_from_the_next_second_on(
    private_redis: RedisServer,
) -> None:
    """It knows no sums of windows; they are added up anew once a second."""
    redis, clock = connect(private_redis.url), VirtualClock(USAGE.at)
    limiter = RedisLimiter(redis, gateway="g", clock=clock)
    scope = Scope(f"tenant/{uuid.uuid4().hex}", Limits(tokens_per_minute=100))
    assert (await limiter.reserve(Claim(id="r", scopes=(scope,), num_tokens=9))).hit is None
    window = f"pf:{{state}}:window:{scope.name}"
    await call(redis, "HINCRBY", window, f"{math.floor(USAGE.at)}r", "1")
    await call(redis, "HINCRBY", window, f"{math.floor(USAGE.at)}t", "80")
    clock.advance(1.0)
    (use,) = await limiter.uses([scope.name])
    assert (use.num_requests, use.num_tokens) == (2, 89)
    verdict = await limiter.reserve(Claim(id="s", scopes=(scope,), num_tokens=12))
    assert verdict.hit is not None
    clock.advance(61.0)
    assert (await limiter.uses([scope.name]))[0].num_tokens == 0
    await limiter.close()
