"""The ingester keeps its lease, and comes back after its engine or Redis was away."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import cycle

import pytest

from kvindex.foundation.errors import DependencyError
from kvindex.index import LoadReport
from kvindex.memory_index import AsyncMemoryIndex
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.renewal_turns import LOOK_S, RenewalTurns, is_news
from kvindex.snapshot import SnapshotData
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, A
from tests.kvindex.following import Follow, X, following
from tests.kvindex.stream_engine import StreamEngine
from tests.redis_server import RedisServer, free_port


async def test_stopping_takes_target_and_record_away(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index) as follow:
        await follow.exact_with(0)
        await until(lambda: _has_record(follow))
    assert await index.match(X) == []
    assert await follow.registry.records() == []


async def _has_record(follow: Follow) -> bool:
    return [r.epoch for r in await follow.registry.records()] == [BOOT_NS]


async def test_mode_and_load_travel_with_the_lease(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index) as follow:
        follow.load = LoadReport(num_running=4, kv_usage=0.5)
        expected = LoadReport(mode="EXACT", num_running=4, kv_usage=0.5)

        async def reported() -> bool:
            return [m.report for m in await index.match([])] == [expected]

        await until(reported)


@pytest.mark.parametrize("store", ["memory", "redis"])
async def test_the_first_measured_speed_is_told_at_once(
    engine: StreamEngine, index: AsyncMemoryIndex, shared_redis: RedisServer, store: str
) -> None:
    in_redis = RedisIndex(connect(shared_redis.url), f"pool-{engine.endpoint}")
    under_test = in_redis if store == "redis" else index
    async with following(engine, under_test, renew_s=3600) as follow:
        await follow.exact_with(0)
        follow.load = LoadReport(num_running=1)
        follow.ingester.report_now()
        await until(partial(_tells, follow, 0.0))
        follow.load = LoadReport(num_running=1, prefill_tokens_per_s=900.0)
        await until(partial(_tells, follow, 900.0))
        follow.load = LoadReport(num_running=1, prefill_tokens_per_s=2000.0)
        await until(partial(_tells, follow, 2000.0))
    await in_redis.close()


async def _tells(follow: Follow, prefill_tokens_per_s: float) -> bool:
    expected = LoadReport(mode="EXACT", num_running=1, prefill_tokens_per_s=prefill_tokens_per_s)
    return [match.report for match in await follow.index.match([])] == [expected]


def test_only_trust_and_another_speed_are_news() -> None:
    last = LoadReport(mode="EXACT", prefill_tokens_per_s=1000.0)
    waiting = LoadReport(mode="EXACT", prefill_tokens_per_s=1900.0, num_waiting=7, kv_usage=0.9)
    assert not is_news(last, last)
    assert not is_news(last, waiting)
    assert is_news(last, LoadReport(mode="EXACT", prefill_tokens_per_s=2001.0))
    assert is_news(last, LoadReport(mode="EXACT", prefill_tokens_per_s=499.0))
    assert not is_news(last, LoadReport(mode="EXACT"))
    assert is_news(LoadReport(), LoadReport(decode_tokens_per_s=0.5))
    assert is_news(last, LoadReport(mode="DEGRADED", prefill_tokens_per_s=1000.0))


async def test_news_that_never_ends_is_told_once_in_every_look() -> None:
    """A speed that doubles and halves all the time does not flood the index."""
    speeds = cycle([100.0, 1000.0])
    turns = RenewalTurns(3600, lambda: LoadReport(prefill_tokens_per_s=next(speeds)))
    turns.ask()
    await turns.next()
    loop = asyncio.get_running_loop()
    started = loop.time()
    for _ in range(3):
        await turns.next()
    assert loop.time() - started >= 3 * LOOK_S - 0.02


async def test_a_silent_engine_core_loses_its_lease_until_it_beats_again(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=0.05, lease_s=0.3) as follow:
        await engine.store(X[:4])
        await follow.exact_with(4)
        epoch = follow.ingester.epoch
        follow.is_alive = False

        async def is_gone() -> bool:
            return await follow.matched() is None

        await until(is_gone)
        assert follow.ingester.mode == "FALLBACK"
        assert follow.ingester.reason == "the engine core of a/0 shows no heartbeat"
        follow.is_alive = True
        await follow.exact_with(4)
        assert epoch is not None
        assert follow.ingester.epoch == epoch + 1


async def test_a_fenced_ingester_registers_again(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index) as follow:
        await engine.store(X[:4])
        await follow.exact_with(4)
        stolen = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
        await until(lambda: follow.ingester.epoch == stolen + 1)
        await follow.exact_with(4)


async def test_a_failing_snapshot_is_tried_again(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    failures = iter([RuntimeError("engine busy"), DependencyError("engine gone")])
    take = engine.snapshot

    async def unsteady_snapshot() -> SnapshotData:
        for failure in failures:
            raise failure
        return await take()

    engine.snapshot = unsteady_snapshot  # type: ignore[method-assign]
    await engine.store(X[:4], delivered=False)
    async with following(engine, index) as follow:
        await until(lambda: follow.ingester.reason == "RuntimeError: engine busy")
        await until(lambda: follow.ingester.reason == "engine gone")
        await follow.exact_with(4)


async def test_repeated_repairs_wait_longer_each_time(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async def no_snapshot() -> SnapshotData:
        engine.num_snapshots += 1
        raise DependencyError("engine gone")

    engine.snapshot = no_snapshot  # type: ignore[method-assign]
    start = asyncio.get_running_loop().time()
    async with following(engine, index) as follow:
        await until(lambda: engine.num_snapshots == 4)
        assert asyncio.get_running_loop().time() - start > 0.1 + 0.2 + 0.4 - 0.05
        assert follow.ingester.mode == "FALLBACK"


async def test_redis_restarted_empty_is_filled_again(
    engine: StreamEngine, private_redis: RedisServer
) -> None:
    index = RedisIndex(connect(private_redis.url), "pool")
    async with following(engine, index) as follow:
        await engine.store(X[:30])
        await follow.exact_with(30)
        private_redis.restart()
        await engine.store(X[30:40])
        await follow.exact_with(40)
        assert follow.ingester.epoch == BOOT_NS + 1
    await index.close()


async def test_redis_down_is_a_fallback_with_a_reason_until_it_is_back(
    engine: StreamEngine, private_redis: RedisServer
) -> None:
    index = RedisIndex(connect(private_redis.url), "pool")
    async with following(engine, index) as follow:
        await engine.store(X[:30])
        await follow.exact_with(30)
        private_redis.kill()
        await until(lambda: follow.ingester.mode == "FALLBACK")
        assert follow.ingester.reason.startswith(f"Redis at {private_redis.url}: ")
        await engine.remove(X[10:30])
        await engine.store(X[10:12])
        assert [r.id for r in await follow.registry.records()] == ["a"]
        private_redis.start()
        await follow.exact_with(12)
    await index.close()


async def test_an_idle_fleet_notices_that_redis_was_emptied(
    engine: StreamEngine, private_redis: RedisServer
) -> None:
    index = RedisIndex(connect(private_redis.url), "pool")
    async with following(engine, index, renew_s=0.05) as follow:
        await engine.store(X[:30])
        await follow.exact_with(30)
        await index._redis.flushall()
        await until(lambda: follow.ingester.counters.num_registrations == 2)
        await follow.exact_with(30)
    await index.close()


@pytest.mark.fault("router-8")
async def test_a_second_reader_and_a_restarted_one_see_the_same(
    engine: StreamEngine, shared_redis: RedisServer
) -> None:
    index = RedisIndex(connect(shared_redis.url), f"pool-{engine.endpoint}")
    async with following(engine, index) as follow:
        await engine.store(X[:30])
        await follow.exact_with(30)
        first = await index.match(X)
        restarted = RedisIndex(connect(shared_redis.url), f"pool-{engine.endpoint}")
        assert await restarted.match(X) == first
        await restarted.close()
    await index.close()


async def test_an_index_that_is_down_from_the_start_does_not_hide_the_replica(
    engine: StreamEngine,
) -> None:
    index = RedisIndex(connect(f"redis://127.0.0.1:{free_port()}/0"), "pool")
    async with following(engine, index) as follow:
        await until(lambda: _has_record(follow))
        assert follow.ingester.mode == "FALLBACK"
        assert follow.ingester.epoch is None
    await index.close()
