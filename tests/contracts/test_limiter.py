"""What every limiter must do, whether in memory, in Redis or in Valkey.

Time is the test's: the window is a minute, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from kvindex.foundation.clock import VirtualClock
from kvindex.redis_connect import connect
from router.config import Limits
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import Claim, Limiter, LimitHit, Scope, Settlement, Spent, Verdict
from router.tenancy.local_limiter import LocalLimiter
from router.tenancy.redis_limiter import RedisLimiter
from tests.redis_server import RedisServer

NOON = 1_796_126_400.0  # 2026-12-01T12:00:00Z


class Subject(NamedTuple):
    """Two gateways' limiters over one store, and the clock of both."""

    one: Limiter
    other: Limiter
    clock: VirtualClock


@pytest.fixture(params=["memory", "redis", "valkey"])
async def limiters(
    request: pytest.FixtureRequest, shared_redis: RedisServer, shared_valkey: RedisServer
) -> AsyncIterator[Subject]:
    clock = VirtualClock(NOON)
    if request.param == "memory":
        ledger = LimitLedger()
        yield Subject(
            LocalLimiter(ledger, gateway="one", clock=clock),
            LocalLimiter(ledger, gateway="other", clock=clock),
            clock,
        )
        return
    server = shared_valkey if request.param == "valkey" else shared_redis
    names = [f"{name}-{uuid.uuid4().hex}" for name in ("one", "other")]
    one, other = (RedisLimiter(connect(server.url), gateway=name, clock=clock) for name in names)
    yield Subject(one, other, clock)
    await one.close()
    await other.close()


def scope(**limits: int) -> Scope:
    """Return a scope that no other test uses."""
    return Scope(f"tenant/{uuid.uuid4().hex}", Limits(**limits))


def claim(*scopes: Scope, tokens: int = 10, id: str | None = None) -> Claim:
    return Claim(id=id or uuid.uuid4().hex, scopes=scopes, num_tokens=tokens)


def settlement(of: Claim, tokens: int) -> Settlement:
    return Settlement(id=of.id, scopes=tuple(s.name for s in of.scopes), num_tokens=tokens)


def hit_of(verdict: Verdict) -> tuple[str, float] | None:
    return (verdict.hit.kind, verdict.hit.retry_after_s) if verdict.hit else None


async def test_an_admitted_claim_is_counted_in_all_of_its_scopes(limiters: Subject) -> None:
    tenant, key = scope(), scope()
    verdict = await limiters.one.reserve(claim(tenant, key, tokens=7))
    assert verdict.hit is None
    assert [use.scope for use in verdict.uses] == [tenant.name, key.name]
    for use in verdict.uses:
        assert (use.num_requests, use.num_tokens, use.num_running) == (1, 7, 1)
        assert (use.day_tokens, use.month_tokens, use.reset_s) == (7, 7, 61.0)


async def test_a_refused_claim_is_counted_in_none(limiters: Subject) -> None:
    tenant, key = scope(), scope(requests_per_minute=1)
    await limiters.one.reserve(claim(tenant, key))
    refused = await limiters.one.reserve(claim(tenant, key))
    assert refused.hit == LimitHit(scope=key.name, kind="requests", limit=1, retry_after_s=61.0)
    assert [use.num_requests for use in refused.uses] == [1, 1]
    assert [use.day_tokens for use in refused.uses] == [10, 10]


async def test_requests_per_minute_hold_in_any_minute_and_over_gateways(limiters: Subject) -> None:
    tenant = scope(requests_per_minute=2)
    assert hit_of(await limiters.one.reserve(claim(tenant))) is None
    limiters.clock.advance(30)
    assert hit_of(await limiters.other.reserve(claim(tenant))) is None
    assert hit_of(await limiters.one.reserve(claim(tenant))) == ("requests", 31.0)
    limiters.clock.advance(30.75)
    assert hit_of(await limiters.other.reserve(claim(tenant))) == ("requests", 0.25)
    limiters.clock.advance(0.25)
    assert hit_of(await limiters.other.reserve(claim(tenant))) is None
    assert hit_of(await limiters.one.reserve(claim(tenant))) == ("requests", 30.0)


async def test_tokens_per_minute_wait_until_enough_has_left_the_window(limiters: Subject) -> None:
    tenant = scope(tokens_per_minute=100)
    for tokens in (30, 30, 40):
        assert hit_of(await limiters.one.reserve(claim(tenant, tokens=tokens))) is None
        limiters.clock.advance(10)
    assert hit_of(await limiters.one.reserve(claim(tenant, tokens=1))) == ("tokens", 31.0)
    assert hit_of(await limiters.one.reserve(claim(tenant, tokens=31))) == ("tokens", 41.0)
    assert hit_of(await limiters.one.reserve(claim(tenant, tokens=100))) == ("tokens", 51.0)
    assert hit_of(await limiters.one.reserve(claim(tenant, tokens=101))) == ("tokens", 60.0)


@pytest.mark.fault("router-52")
async def test_a_simultaneous_burst_from_two_gateways_never_passes_the_limit(
    limiters: Subject,
) -> None:
    tenant = scope(tokens_per_minute=1000)
    claims = [claim(tenant, tokens=30) for _ in range(80)]
    verdicts = await asyncio.gather(
        *(limiters.one.reserve(c) for c in claims[::2]),
        *(limiters.other.reserve(c) for c in claims[1::2]),
    )
    assert sum(verdict.hit is None for verdict in verdicts) == 33
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.num_tokens, use.num_requests) == (990, 33)


async def test_parallel_requests_are_given_back_at_the_end(limiters: Subject) -> None:
    tenant = scope(max_parallel=1)
    first = claim(tenant)
    assert hit_of(await limiters.one.reserve(first)) is None
    assert hit_of(await limiters.one.reserve(claim(tenant))) == ("parallel", 1.0)
    await limiters.one.settle(settlement(first, 10))
    assert hit_of(await limiters.one.reserve(claim(tenant))) is None


async def test_what_a_dead_gateway_had_running_is_not_counted_and_its_tokens_are(
    limiters: Subject,
) -> None:
    tenant = scope(max_parallel=1)
    await limiters.one.heartbeat(lease_s=10)
    first = claim(tenant)
    await limiters.one.reserve(first)
    assert hit_of(await limiters.other.reserve(claim(tenant))) == ("parallel", 1.0)
    limiters.clock.advance(10)
    second = claim(tenant)
    verdict = await limiters.other.reserve(second)
    assert (verdict.hit, verdict.uses[0].num_tokens) == (None, 20)
    # It was only slow, and comes back: its end is not taken from somebody else.
    await limiters.one.settle(settlement(first, 10))
    (use,) = await limiters.other.uses([tenant.name])
    assert use.num_running == 1


@pytest.mark.fault("router-50")
async def test_settling_charges_what_was_really_used(limiters: Subject) -> None:
    tenant = scope(tokens_per_minute=1000)
    less, more = claim(tenant, tokens=300), claim(tenant, tokens=300)
    await limiters.one.reserve(less)
    await limiters.one.reserve(more)
    await limiters.one.settle(settlement(less, 50))
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.num_tokens, use.day_tokens, use.month_tokens) == (350, 350, 350)
    await limiters.one.settle(settlement(more, 50_000))
    verdict = await limiters.other.reserve(claim(tenant, tokens=1))
    assert hit_of(verdict) == ("tokens", 61.0)
    assert verdict.uses[0].num_tokens == 50_050


async def test_debt_counts_from_its_settlement_on_and_a_refund_in_its_own_second(
    limiters: Subject,
) -> None:
    tenant = scope()
    first, second = claim(tenant, tokens=100), claim(tenant, tokens=100)
    await limiters.one.reserve(first)
    await limiters.one.reserve(second)
    limiters.clock.advance(61)
    await limiters.one.settle(settlement(first, 40))
    await limiters.one.settle(settlement(second, 130))
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.num_tokens, use.day_tokens) == (30, 170)


async def test_reserving_and_settling_twice_is_as_good_as_once(limiters: Subject) -> None:
    tenant = scope(requests_per_minute=1)
    once = claim(tenant, tokens=100)
    for _ in range(2):
        assert hit_of(await limiters.one.reserve(once)) is None
    for _ in range(2):
        await limiters.one.settle(settlement(once, 60))
    verdict = await limiters.one.reserve(once)
    use = verdict.uses[0]
    assert verdict.hit is None
    assert (use.num_requests, use.num_tokens, use.num_running, use.day_tokens) == (1, 60, 0, 60)


async def test_a_settlement_of_a_claim_that_nobody_knows_is_charged_in_full(
    limiters: Subject,
) -> None:
    tenant = scope()
    unknown = claim(tenant, tokens=100)
    for _ in range(2):
        await limiters.one.settle(settlement(unknown, 70))
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.num_tokens, use.day_tokens, use.num_running) == (70, 70, 0)


async def test_settlements_that_come_together_count_like_one_after_the_other(
    limiters: Subject,
) -> None:
    tenant = scope()
    claims = [claim(tenant, tokens=10) for _ in range(3)]
    for each in claims:
        await limiters.one.reserve(each)
    ended = [settlement(each, tokens) for each, tokens in zip(claims, (0, 5, 30), strict=True)]
    await limiters.one.settle(*ended, settlement(claims[0], 99))
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.num_requests, use.num_tokens, use.num_running, use.day_tokens) == (3, 35, 0, 35)


async def test_budgets_are_those_of_days_and_months_in_utc(limiters: Subject) -> None:
    tenant = scope(tokens_per_day=100, tokens_per_month=150)
    assert hit_of(await limiters.one.reserve(claim(tenant, tokens=100))) is None
    assert hit_of(await limiters.one.reserve(claim(tenant, tokens=1))) == ("day", 12 * 3600.0)
    limiters.clock.advance(12 * 3600)
    assert hit_of(await limiters.other.reserve(claim(tenant, tokens=50))) is None
    verdict = await limiters.other.reserve(claim(tenant, tokens=1))
    assert hit_of(verdict) == ("month", 30 * 86400.0)
    assert (verdict.uses[0].day_tokens, verdict.uses[0].month_tokens) == (50, 150)


async def test_a_claim_is_settled_in_the_day_that_it_was_made_in(limiters: Subject) -> None:
    tenant = scope()
    late = claim(tenant, tokens=100)
    limiters.clock.advance(12 * 3600 - 1)
    await limiters.one.reserve(late)
    limiters.clock.advance(2)
    await limiters.one.settle(settlement(late, 400))
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.day_tokens, use.month_tokens, use.num_tokens) == (0, 400, 400)


async def test_what_was_spent_can_be_recalled_and_is_never_lowered(limiters: Subject) -> None:
    tenant = scope()
    await limiters.one.reserve(claim(tenant, tokens=100))
    day, month = "2026-12-01", "2026-12"
    await limiters.other.recall(
        [Spent(tenant.name, "day", day, 40), Spent(tenant.name, "month", month, 900)]
    )
    (use,) = await limiters.one.uses([tenant.name])
    assert (use.day_tokens, use.month_tokens) == (100, 900)


async def test_live_gateways_are_counted_until_their_leases_lapse(limiters: Subject) -> None:
    # Months ahead of every other test on the same server, where no lease of theirs is left.
    limiters.clock.advance(100 * 86400)
    assert await limiters.one.heartbeat(lease_s=10) == (1, False)
    limiters.clock.advance(5)
    assert await limiters.other.heartbeat(lease_s=10) == (2, False)
    limiters.clock.advance(6)
    assert await limiters.other.heartbeat(lease_s=10) == (1, True)
