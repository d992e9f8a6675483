"""Fixtures of the contract suites: every implementation, on real servers where it needs one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contracts.index_subject import Subject, memory_subject, redis_subject
from tests.redis_server import RedisServer, private_redis, shared_redis, shared_valkey

__all__ = ["private_redis", "shared_redis", "shared_valkey"]


@pytest.fixture(params=["memory", "redis", "valkey"])
async def subject(
    request: pytest.FixtureRequest, shared_redis: RedisServer, shared_valkey: RedisServer
) -> AsyncIterator[Subject]:
    if request.param == "memory":
        yield memory_subject()
        return
    server = shared_valkey if request.param == "valkey" else shared_redis
    async with redis_subject(server.url) as under_test:
        yield under_test
