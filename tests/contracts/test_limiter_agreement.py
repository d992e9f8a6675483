"""Memory and Redis give the same verdicts on the same random history, number for number."""

from __future__ import annotations

import random
import uuid

import pytest

from kvindex.foundation.clock import VirtualClock
from kvindex.redis_connect import connect
from router.config import Limits
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import Claim, Scope, Settlement
from router.tenancy.local_limiter import LocalLimiter
from router.tenancy.redis_limiter import RedisLimiter
from tests.redis_server import RedisServer

LATE_ON_NEW_YEARS_EVE = 1_798_761_300.25
NUM_STEPS = 400


def random_limits(draw: random.Random) -> Limits:
    """Return limits that are often hit, each of them missing now and then."""
    values = {
        "requests_per_minute": draw.randint(3, 12),
        "tokens_per_minute": draw.randint(200, 900),
        "max_parallel": draw.randint(1, 6),
        "tokens_per_day": draw.randint(1500, 6000),
        "tokens_per_month": draw.randint(3000, 9000),
    }
    return Limits(**{name: value for name, value in values.items() if draw.random() < 0.6})


@pytest.mark.parametrize("seed", range(3))
async def test_a_random_history_is_judged_alike(seed: int, shared_redis: RedisServer) -> None:
    draw, clock, ledger = random.Random(seed), VirtualClock(LATE_ON_NEW_YEARS_EVE), LimitLedger()
    run = uuid.uuid4().hex
    names = [f"{run}-{i}" for i in range(2)]
    memory = [LocalLimiter(ledger, gateway=name, clock=clock) for name in names]
    redis = [RedisLimiter(connect(shared_redis.url), gateway=n, clock=clock) for n in names]
    scopes = [Scope(f"tenant/{run}-{i}", random_limits(draw)) for i in range(3)]
    open_claims: list[Claim] = []
    num_refused = 0
    for step in range(NUM_STEPS):
        gateway, action = draw.randrange(2), draw.random()
        if action < 0.55:
            chosen = tuple(draw.sample(scopes, draw.randint(1, 2)))
            claim = Claim(id=f"{run}-{step}", scopes=chosen, num_tokens=draw.randint(0, 150))
            if open_claims and draw.random() < 0.1:
                claim = draw.choice(open_claims)
            verdict = await memory[gateway].reserve(claim)
            other = await redis[gateway].reserve(claim)
            assert (other.hit, other.uses) == (verdict.hit, verdict.uses), step
            num_refused += verdict.hit is not None
            if verdict.hit is None:
                open_claims.append(claim)
        elif action < 0.8 and open_claims:
            claim = draw.choice(open_claims)
            settlement = Settlement(
                id=claim.id,
                scopes=tuple(scope.name for scope in claim.scopes),
                num_tokens=draw.randint(0, 300),
            )
            await memory[gateway].settle(settlement)
            await redis[gateway].settle(settlement)
        elif action < 0.9:
            await memory[gateway].heartbeat(lease_s=20)
            await redis[gateway].heartbeat(lease_s=20)
        else:
            clock.advance(draw.choice([0.25, 1.0, 7.5, 30.0, 120.0]))
        found = [scope.name for scope in scopes]
        assert await redis[gateway].uses(found) == await memory[gateway].uses(found), step
    assert num_refused > 20
    for limiter in redis:
        await limiter.close()
