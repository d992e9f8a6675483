"""Decisions of any gateway are found by every gateway, bounded, and cost nobody an answer."""

from __future__ import annotations

import pytest

from kvindex.foundation.errors import DependencyError
from kvindex.redis_connect import connect
from router.observe.decisions import DecisionLog, DecisionRecord
from router.observe.shared_decisions import SharedDecisions
from tests.redis_server import RedisServer


def record(request_id: str, *, at: float = 1.0, tenant: str = "acme") -> DecisionRecord:
    return DecisionRecord(
        request_id=request_id,
        unique_id=f"{request_id}.1",
        at=at,
        tenant=tenant,
        model="tiny",
        status=200,
        num_prompt_tokens=3,
        num_predicted_tokens=0,
        usage=None,
        ttft_s=0.1,
        duration_s=0.2,
        attempts=[],
        gateway="gw-a",
    )


def gateway(server: RedisServer, *, max_records: int = 100) -> DecisionLog:
    shared = SharedDecisions(connect(server.url), max_records=max_records)
    return DecisionLog(max_records=2, shared=shared)


async def test_another_gateway_finds_what_was_delivered(private_redis: RedisServer) -> None:
    first, second = gateway(private_redis), gateway(private_redis)
    for i in range(600):  # More than one batch, and more than the first one keeps itself.
        first.add(record(f"r{i}"))
    await first.flush()
    assert await second.find("r599") == record("r599")
    assert await first.find("r500") == record("r500")
    assert await second.find("r400") is None  # Only 100 are kept, over all gateways.
    await first.close()
    await second.close()


async def test_keys_are_bounded_and_end_by_themselves(private_redis: RedisServer) -> None:
    log, redis = gateway(private_redis, max_records=5), connect(private_redis.url)
    for i in range(20):
        log.add(record(f"r{i}"))
    await log.close()
    keys = sorted(await redis.keys("*"))
    assert len(keys) == 6
    assert all([0 < await redis.ttl(key) <= 3600 for key in keys])
    await redis.aclose()


async def test_the_newest_of_all_gateways_are_listed(private_redis: RedisServer) -> None:
    first, second = gateway(private_redis), gateway(private_redis)
    for i in range(6):
        tenant = "globex" if i == 0 else "acme"
        (first, second)[i % 2].add(record(f"r{i}", at=float(i), tenant=tenant))
    await first.flush()
    # What the second has not delivered yet it lists all the same, for itself.
    assert [r.request_id for r in await second.newest(4)] == ["r5", "r4", "r3", "r2"]
    assert [r.request_id for r in await first.newest(4)] == ["r4", "r2", "r0"]
    assert [r.request_id for r in await second.newest(4, tenant="globex")] == ["r0"]
    private_redis.kill()
    assert [r.request_id for r in await first.newest(4)] == ["r4", "r2"]  # It keeps two itself.
    private_redis.start()
    await first.close()
    await second.close()


async def test_while_redis_is_away_own_decisions_are_found_and_others_wait(
    private_redis: RedisServer,
) -> None:
    first, second = gateway(private_redis), gateway(private_redis)
    private_redis.kill()
    first.add(record("a"))
    await first.flush()
    assert await first.find("a") == record("a")
    with pytest.raises(DependencyError):
        await second.find("a")
    private_redis.start()
    await first.flush()
    assert await second.find("a") == record("a")
    await first.close()
    await second.close()
