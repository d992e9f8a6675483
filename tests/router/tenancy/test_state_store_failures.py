"""The state Redis dies, hangs back empty, or is not there at the start: keys and limits go on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from kvindex.redis_connect import connect
from router.tenancy.fleet_limiter import FleetLimiter
from router.tenancy.redis_usage import RedisUsageLog
from tests.conditions import until
from tests.redis_server import RedisServer
from tests.router.running_gateway import Running, completion, gateway_spec, running_gateway
from tests.router.tenancy.fleet import limited, make_tenant, over, two_gateways


async def status_of(running: Running, key: str) -> int:
    """Return the status of one completion."""
    status, _, _ = await running.post("/v1/completions", completion("x"), key=key)
    return status


def limiter_of(running: Running) -> FleetLimiter:
    """Return the limiter of a gateway over Redis."""
    limiter = running.gateway.tenancy.limiter
    assert isinstance(limiter, FleetLimiter)
    return limiter


async def know_each_other(*gateways: Running) -> None:
    """Return once every gateway has counted them all."""
    await until(lambda: all(limiter_of(g).num_gateways == len(gateways) for g in gateways))


async def test_while_redis_is_away_each_gateway_enforces_its_share(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis, limited(requests_per_minute=10)) as (one, other):
        await know_each_other(one, other)
        before = [await status_of(one, "sk-acme") for _ in range(3)]
        private_redis.kill()
        alone = [await status_of(one, "sk-acme") for _ in range(4)]
        others = [await status_of(other, "sk-acme") for _ in range(7)]
        assert before == [200] * 3
        assert alone == [200, 200, 429, 429]
        assert others == [200] * 5 + [429] * 2
        assert "prefixfleet_limits_shared 0.0" in (await one.admin("/metrics"))[1]
        _, health = await one.admin("/health")
        assert (health["status"], health["state"]["reachable"]) == ("ok", False)


async def test_a_budget_is_divided_as_far_as_it_was_left(private_redis: RedisServer) -> None:
    async with two_gateways(private_redis, limited(tokens_per_day=100)) as (one, other):
        await know_each_other(one, other)
        # 2 + 3 tokens each, of which 2 + 3 are expected as soon as one answer is known.
        for _ in range(8):
            assert await status_of(one, "sk-acme") == 200
            await until(lambda: limiter_of(one).num_undelivered == 0)
        (spent,) = await limiter_of(one).uses(["tenant/acme"])
        private_redis.kill()
        statuses = [await status_of(one, "sk-acme") for _ in range(12)]
        share = (100 - spent.day_tokens) // 2
        assert spent.day_tokens == 40
        assert statuses.count(200) * 5 <= share < (statuses.count(200) + 1) * 5


async def test_what_ran_while_redis_was_away_is_charged_and_recorded_when_it_is_back(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis, limited(tokens_per_day=10_000)) as (one, other):
        await know_each_other(one, other)
        private_redis.kill()
        assert [await status_of(gateway, "sk-acme") for gateway in (one, other)] == [200, 200]
        await until(lambda: [limiter_of(g).num_undelivered for g in (one, other)] == [1, 1])
        private_redis.start()
        await until(lambda: limiter_of(one).down_reason is None)
        await until(lambda: limiter_of(other).down_reason is None)
        (use,) = await limiter_of(one).uses(["tenant/acme"])
        assert (use.day_tokens, use.num_running) == (10, 0)
        redis = connect(private_redis.url)
        page = await RedisUsageLog(redis).page(after=None, since=0.0, limit=10)
        await redis.aclose()
        assert [(r.tenant, r.key, r.charged_tokens) for r in page.records] == [
            ("acme", "ci", 5)
        ] * 2


async def test_an_emptied_redis_refuses_no_key_and_is_filled_again(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis) as (one, other):
        key = await make_tenant(one)
        assert await status_of(other, key) == 200
        private_redis.restart()
        statuses = [await status_of(gateway, key) for gateway in (one, other) * 5]
        assert set(statuses) == {200}
        await until(lambda: limiter_of(one).down_reason is None)
        lives = [gateway.gateway.tenancy.live for gateway in (one, other)]
        await until(lambda: sum(live.num_restored for live in lives) == 1)
        async with running_gateway(
            gateway_spec(tenants=()), replicas=1, id="third", tenancy=over(private_redis)
        ) as third:
            assert await status_of(third, key) == 200
        status, _ = await other.admin("/admin/tenants/acme/keys/ci/block", method="POST")
        assert status == 200
        assert await status_of(one, key) == 401


async def test_an_emptied_redis_does_not_give_a_budget_twice(private_redis: RedisServer) -> None:
    async with two_gateways(private_redis, limited(tokens_per_day=10_000)) as (one, other):
        for gateway in (one, other, one):
            assert await status_of(gateway, "sk-acme") == 200
            await gateway.gateway.background.drain(timeout_s=5)
        assert (await limiter_of(one).uses(["tenant/acme"]))[0].day_tokens == 15
        private_redis.kill()
        assert await status_of(one, "sk-acme") == 200
        private_redis.start()

        async def is_recalled() -> bool:
            return (await limiter_of(other).uses(["tenant/acme"]))[0].day_tokens == 20

        await until(is_recalled)
        await until(lambda: limiter_of(one).down_reason is None)
        assert await is_recalled()


async def test_a_gateway_that_starts_without_redis_knows_the_keys_of_its_last_run(
    private_redis: RedisServer, tmp_path: Path
) -> None:
    spec = gateway_spec(tenants=(), cache_dir=str(tmp_path))
    async with running_gateway(spec, replicas=1, tenancy=over(private_redis)) as first:
        key = await make_tenant(first)
        assert await status_of(first, key) == 200
    assert (tmp_path / "tenants.json").stat().st_mode & 0o777 == 0o600
    assert key not in (tmp_path / "tenants.json").read_text()
    private_redis.kill()
    async with running_gateway(spec, replicas=1, tenancy=over(private_redis)) as again:
        assert await status_of(again, key) == 200
        assert await status_of(again, "sk-wrong") == 401
        status, answer = await again.admin("/admin/tenants", method="POST", body={"name": "new"})
        assert (status, answer["error"]["code"]) == (503, "dependency_unavailable")


async def test_a_lone_gateway_keeps_what_was_made_through_its_api(tmp_path: Path) -> None:
    spec = gateway_spec(tenants=(), cache_dir=str(tmp_path))
    async with running_gateway(spec, replicas=1) as first:
        key = await make_tenant(first)
    async with running_gateway(spec, replicas=1) as again:
        assert await status_of(again, key) == 200
        assert (await again.admin("/admin/tenants/acme"))[1]["keys"][0]["alias"] == "ci"


async def test_a_client_that_leaves_while_its_claim_is_made_leaves_nothing_behind(
    private_redis: RedisServer,
) -> None:
    spec = gateway_spec(tenants=(limited(max_parallel=1),))
    async with running_gateway(spec, replicas=1, tenancy=over(private_redis)) as running:
        os.kill(private_redis.pid, signal.SIGSTOP)
        call = asyncio.create_task(running.post("/v1/completions", completion("x"), key="sk-acme"))
        await until(lambda: running.gateway.admission.num_admitted == 1)
        call.cancel()
        await until(lambda: running.gateway.admission.num_admitted == 0)
        os.kill(private_redis.pid, signal.SIGCONT)
        await until(lambda: limiter_of(running).num_undelivered == 0)
        await until(lambda: limiter_of(running).down_reason is None)
        await running.gateway.background.drain(timeout_s=5)
        (use,) = await limiter_of(running).uses(["tenant/acme"])
        assert (use.num_running, use.day_tokens) == (0, 0)
        assert await status_of(running, "sk-acme") == 200
