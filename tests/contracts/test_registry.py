"""The contract of Registry, held by the one in memory and by the one in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvindex.foundation.clock import VirtualClock
from kvindex.foundation.errors import DependencyError
from kvindex.hashing import HashScheme, known_answer
from kvindex.memory_registry import MemoryRegistry
from kvindex.redis_connect import connect
from kvindex.redis_registry import KEY, RedisRegistry
from kvindex.registry import ModelIdentity, ReplicaRecord, sign_record
from tests.contracts.index_subject import redis_subject
from tests.redis_server import RedisServer, free_port

SECRET = b"fleet secret"
Subject = tuple[RedisRegistry | MemoryRegistry, Callable[[float], Awaitable[None]]]


def record(replica_id: str, *, epoch: int = 1) -> ReplicaRecord:
    scheme = HashScheme()
    return ReplicaRecord(
        id=replica_id,
        kind="prefixfleet",
        url=f"http://127.0.0.1/{replica_id}",
        epoch=epoch,
        served_models=("m",),
        identity=ModelIdentity(model="m"),
        hash_scheme=scheme,
        known_answer=known_answer(scheme),
    )


@pytest.fixture(params=["memory", "redis"])
async def subject(
    request: pytest.FixtureRequest, shared_redis: RedisServer
) -> AsyncIterator[Subject]:
    if request.param == "memory":
        clock = VirtualClock(1000.0)

        async def advance(seconds: float) -> None:
            clock.advance(seconds)

        yield MemoryRegistry(clock), advance
        return
    redis = connect(shared_redis.url)
    await redis.delete(KEY)
    registry = RedisRegistry(redis, SECRET)
    async with redis_subject(shared_redis.url) as server_clock:
        yield registry, server_clock.elapse
    await registry.close()


async def test_records_are_listed_by_id(subject: Subject) -> None:
    registry, _ = subject
    assert await registry.records() == []
    await registry.publish(record("b"), lease_s=60)
    await registry.publish(record("a"), lease_s=60)
    assert await registry.records() == [record("a"), record("b")]


async def test_a_record_is_replaced(subject: Subject) -> None:
    registry, _ = subject
    await registry.publish(record("a", epoch=1), lease_s=60)
    await registry.publish(record("a", epoch=2), lease_s=60)
    assert await registry.records() == [record("a", epoch=2)]


async def test_a_record_lapses_unless_it_is_refreshed(subject: Subject) -> None:
    registry, elapse = subject
    await registry.publish(record("a"), lease_s=0.3)
    await registry.publish(record("b"), lease_s=0.3)
    await registry.publish(record("b"), lease_s=60)
    await elapse(0.3)
    assert await registry.records() == [record("b")]
    await registry.publish(record("a"), lease_s=60)
    assert await registry.records() == [record("a"), record("b")]


async def test_a_withdrawn_record_is_gone_at_once(subject: Subject) -> None:
    registry, _ = subject
    await registry.publish(record("a"), lease_s=60)
    await registry.withdraw("a")
    await registry.withdraw("never there")
    assert await registry.records() == []


async def test_forged_and_unreadable_records_are_left_out_and_logged_once(
    shared_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis = connect(shared_redis.url)
    await redis.delete(KEY)
    registry = RedisRegistry(redis, SECRET)
    await registry.publish(record("good"), lease_s=60)
    await RedisRegistry(redis, b"another secret").publish(record("forged"), lease_s=60)
    lapses_never = b"9999999999999\n"
    moved = sign_record(record("good"), SECRET)
    await redis.hset(KEY, "elsewhere", lapses_never + moved)
    await redis.hset(KEY, "short", lapses_never + b"x")
    await redis.hset(KEY, "garbage", b"no instant")
    for _ in range(2):
        assert await registry.records() == [record("good")]
    refused = [message for message in caplog.messages if "refused" in message]
    assert sorted(refused) == [
        "replica=b'elsewhere' refused: replica record: it is of 'good'",
        "replica=b'forged' refused: replica record: wrong signature (another fleet secret?)",
        "replica=b'short' refused: replica record: wrong signature (another fleet secret?)",
    ]
    await registry.close()


async def test_lapsed_and_unreadable_records_do_not_pile_up(shared_redis: RedisServer) -> None:
    redis = connect(shared_redis.url)
    await redis.delete(KEY)
    registry = RedisRegistry(redis, SECRET)
    await redis.hset(KEY, "garbage", b"no instant")
    await redis.hset(KEY, "lapsed", b"1\nrecord")
    await registry.publish(record("a"), lease_s=60)
    assert await redis.hkeys(KEY) == [b"a"]
    await registry.close()


async def test_an_unreachable_registry_is_an_error_that_names_the_server() -> None:
    port = free_port()
    registry = RedisRegistry(connect(f"redis://127.0.0.1:{port}/0"), SECRET)
    calls = [registry.publish(record("a"), lease_s=1), registry.withdraw("a"), registry.records()]
    for call in calls:
        with pytest.raises(DependencyError, match=f"Redis at redis://127.0.0.1:{port}/0"):
            await call
    await registry.close()


async def test_a_task_belongs_to_one_owner_at_a_time(subject: Subject) -> None:
    registry, _ = subject
    assert await registry.claim("bridge/a", "gw-1", lease_s=60)
    assert await registry.claim("bridge/a", "gw-1", lease_s=60)
    assert not await registry.claim("bridge/a", "gw-2", lease_s=60)
    assert await registry.claim("bridge/b", "gw-2", lease_s=60)
    await registry.unclaim("bridge/a", "gw-2")
    assert not await registry.claim("bridge/a", "gw-2", lease_s=60)
    await registry.unclaim("bridge/a", "gw-1")
    assert await registry.claim("bridge/a", "gw-2", lease_s=60)
    await registry.unclaim("bridge/a", "gw-2")
    await registry.unclaim("bridge/b", "gw-2")


async def test_a_task_of_an_owner_that_died_is_taken_over(subject: Subject) -> None:
    registry, elapse = subject
    assert await registry.claim("bridge/c", "gw-1", lease_s=0.02)
    await elapse(0.02)
    assert await registry.claim("bridge/c", "gw-2", lease_s=60)
    assert not await registry.claim("bridge/c", "gw-1", lease_s=60)
    await registry.unclaim("bridge/c", "gw-2")
