"""What gateways exchange through a limiter, in memory or in Redis: notices and retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from kvindex.foundation.clock import VirtualClock
from kvindex.redis_connect import connect
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import Limiter, Notice
from router.tenancy.local_limiter import LocalLimiter
from router.tenancy.redis_limiter import RedisLimiter
from tests.redis_server import RedisServer

NOON = 1_796_126_400.0  # 2026-12-01T12:00:00Z
LEASE_S = 10.0
BURST = 12.0


class Subject(NamedTuple):
    """Two gateways' limiters over one store, and the clock of both."""

    one: Limiter
    other: Limiter
    clock: VirtualClock

    async def beat(self) -> None:
        """Renew both leases."""
        await self.one.heartbeat(lease_s=LEASE_S)
        await self.other.heartbeat(lease_s=LEASE_S)


@pytest.fixture(params=["memory", "redis"])
async def limiters(
    request: pytest.FixtureRequest, private_redis: RedisServer
) -> AsyncIterator[Subject]:
    clock = VirtualClock(NOON)
    if request.param == "memory":
        ledger = LimitLedger()
        one, other = (LocalLimiter(ledger, gateway=g, clock=clock) for g in ("one", "other"))
        yield Subject(one, other, clock)
        return
    in_redis = [
        RedisLimiter(connect(private_redis.url), gateway=g, clock=clock) for g in ("one", "other")
    ]
    yield Subject(in_redis[0], in_redis[1], clock)
    for limiter in in_redis:
        await limiter.close()


def told(*, earned: float = 0.0, spent: int = 0, says: str = "") -> Notice:
    return Notice(burst=BURST, earned=earned, spent=spent, says=says)


async def test_the_retries_of_the_fleet_are_divided_and_never_granted_twice(
    limiters: Subject,
) -> None:
    one, other, clock = limiters
    await one.heartbeat(lease_s=LEASE_S)
    assert (await one.exchange(told())).retries == 12.0
    await other.heartbeat(lease_s=LEASE_S)
    assert (await other.exchange(told())).retries == 0.0
    assert (await one.exchange(told(spent=2))).retries == 5.0  # Half of what is left.
    assert (await other.exchange(told())).retries == 2.5
    assert (await one.exchange(told(spent=2, earned=1.0))).retries == 4.25
    # What a gateway that is gone had not spent is there again once its lease has lapsed.
    clock.advance(LEASE_S + 1)
    await one.heartbeat(lease_s=LEASE_S)
    assert (await one.exchange(told(spent=10, earned=1.0))).retries == 3.0


async def test_the_last_whole_retry_is_not_divided(limiters: Subject) -> None:
    await limiters.beat()
    await limiters.one.exchange(told())
    assert (await limiters.one.exchange(told(spent=11))).retries == 1.0
    assert (await limiters.other.exchange(told())).retries == 0.0


async def test_the_retries_of_the_fleet_never_exceed_its_burst(limiters: Subject) -> None:
    await limiters.beat()
    for earned in (0.0, 100.0, 200.0):
        notice = told(earned=earned)
        answers = [await limiter.exchange(notice) for limiter in (limiters.one, limiters.other)]
        assert sum(answer.retries or 0.0 for answer in answers) <= BURST


async def test_gateways_hear_what_the_live_others_say(limiters: Subject) -> None:
    await limiters.beat()
    assert (await limiters.one.exchange(told(says="first"))).others == {}
    assert (await limiters.other.exchange(told(says="second"))).others == {"one": "first"}
    assert (await limiters.one.exchange(told(says="third"))).others == {"other": "second"}
    limiters.clock.advance(LEASE_S + 1)
    await limiters.one.heartbeat(lease_s=LEASE_S)
    assert (await limiters.one.exchange(told(says="alone"))).others == {}
