"""Limits over two gateways that share one Redis, under a burst through both."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.redis_server import RedisServer
from tests.router.running_gateway import Running, completion
from tests.router.tenancy.fleet import limited, two_gateways


async def burst(gateways: tuple[Running, Running], number: int) -> Counter[int]:
    """Send requests through both at once; return how many ended with which status."""
    answers = await asyncio.gather(
        *(
            gateways[i % 2].post(
                "/v1/completions", completion(f"{i:02d}" + "x" * 18), key="sk-acme"
            )
            for i in range(number)
        )
    )
    return Counter(status for status, _, _ in answers)


@pytest.mark.fault("router-52")
async def test_requests_per_minute_are_exact_over_two_gateways(private_redis: RedisServer) -> None:
    async with two_gateways(private_redis, limited(requests_per_minute=15)) as gateways:
        assert await burst(gateways, 50) == {200: 15, 429: 35}
        assert sum(len(g.replicas[0].bodies) for g in gateways) == 15


@pytest.mark.fault("router-52")
async def test_tokens_per_minute_pass_by_no_more_than_what_one_request_was_underestimated(
    private_redis: RedisServer,
) -> None:
    async with two_gateways(private_redis, limited(tokens_per_minute=400)) as gateways:
        statuses = await burst(gateways, 40)
        for gateway in gateways:
            await gateway.gateway.background.drain(timeout_s=5)
        (use,) = await gateways[0].gateway.tenancy.limiter.uses(["tenant/acme"])
        # 21 prompt tokens and at most 16 of output are claimed for each, 24 charged in the end.
        assert 400 // 37 <= statuses[200] <= 400 // 24
        assert use.num_tokens == 24 * statuses[200] <= 400


async def test_nothing_is_left_running_after_a_mix_of_ends(private_redis: RedisServer) -> None:
    async with two_gateways(private_redis, limited(max_parallel=4)) as gateways:
        one, other = gateways
        other.replicas[0].behaviour.die_at = 1
        calls = [
            asyncio.create_task(
                gateways[i % 2].post(
                    "/v1/completions", completion("x", stream=i % 3 == 0), key="sk-acme"
                )
            )
            for i in range(24)
        ]
        for call in calls[::5]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for gateway in gateways:
            await gateway.nothing_runs()
            await gateway.gateway.background.drain(timeout_s=5)
        (use,) = await one.gateway.tenancy.limiter.uses(["tenant/acme"])
        assert use.num_running == 0
