"""What the index costs Redis: no scans, no leftovers, no long scripts, one slot per pool."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from redis.asyncio import Redis

from kvindex.index import LoadReport, SequencedOps, Target
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, CLEARED, A, B, Subject, chain, removed, stored
from tests.redis_server import RedisServer

FORBIDDEN = {"keys", "scan", "sscan", "hscan", "zscan", "flushall", "flushdb", "randomkey"}


async def _untouched(seconds: float) -> None:
    raise AssertionError(f"this test does not wait {seconds} s")


async def use_everything(index: RedisIndex) -> None:
    """Call every operation of the index, with every outcome that has commands of its own."""
    hashes = chain(40)
    subject = Subject(index, _untouched)
    epoch = await subject.filled(A, hashes)
    other = await subject.filled(B, hashes)
    await index.renew(A, epoch, lease_s=60, report=LoadReport())
    await index.apply(A, epoch, [SequencedOps(1, (removed(hashes[30:]), CLEARED))])
    await index.apply(A, epoch, [SequencedOps(9, ())])
    await index.load_snapshot(A, epoch, seq=9, ops=[stored(hashes), stored(hashes, tier="host")])
    await index.load_snapshot(A, epoch + 1, seq=9, ops=[stored(hashes)])
    await index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", pending=chain(5, "y"))
    await subject.reserve("s", pending=chain(5, "y"))
    await index.match(hashes[:20] + chain(5, "y"))
    await index.match(chain(5, "y"))
    await index.release_prefill(A, "r", 0)
    await index.release(A, "r", 0, written=True)
    await index.release(A, "s", 0, written=False)
    await index.states()
    await index.deregister(A, epoch)
    await index.deregister(B, other)


@pytest.mark.fault("router-29")
async def test_no_operation_walks_over_keys(private_redis: RedisServer) -> None:
    redis = connect(private_redis.url)
    index = RedisIndex(connect(private_redis.url), "pool")
    seen: list[str] = []
    async with redis.monitor() as monitor:

        async def listen() -> None:
            async for entry in monitor.listen():
                seen.append(entry["command"])

        listening = asyncio.create_task(listen())
        await use_everything(index)
        await redis.echo("the end")
        await until(lambda: any("the end" in command for command in seen))
        listening.cancel()
    verbs = {command.split(" ", 1)[0].strip('"').lower() for command in seen}
    assert verbs >= {"evalsha", "sadd", "sismember", "unlink", "zadd"}
    assert verbs & FORBIDDEN == set()
    await index.close()
    await redis.aclose()


async def test_every_key_of_a_pool_is_in_its_slot(private_redis: RedisServer) -> None:
    redis = connect(private_redis.url)
    index = RedisIndex(redis, "0123456789abcdef")
    subject = Subject(index, _untouched)
    await subject.filled(Target("odd{name}"), chain(3))
    await index.touch_gateway("g", lease_s=60)
    await subject.reserve("r", target=Target("odd{name}"), pending=chain(2, "y"))
    keys = [str(key, "utf-8") for key in await redis.keys() if isinstance(key, bytes)]
    assert len(keys) >= 9
    tags = [re.match(r"pf:\{(.*?)\}:", key) for key in keys]
    assert {tag and tag.group(1) for tag in tags} == {"0123456789abcdef"}
    await index.close()


async def _used_memory(redis: Redis) -> int:
    return int((await redis.info("memory"))["used_memory"])


async def _fill_and_empty(index: RedisIndex, epoch: int, *, first_seq: int, redis: Redis) -> int:
    """Store 50,000 blocks and remove them again, in 100 batches; return the memory of the peak."""
    hashes = chain(50_000)
    parts = [hashes[first : first + 1000] for first in range(0, len(hashes), 1000)]
    for seq, part in enumerate(parts, first_seq):
        await index.apply(A, epoch, [SequencedOps(seq, (stored(part),))])
    peak = await _used_memory(redis)
    for seq, part in enumerate(parts, first_seq + 50):
        await index.apply(A, epoch, [SequencedOps(seq, (removed(part),))])
    return peak


@pytest.mark.fault("router-33")
async def test_after_all_removals_nothing_is_left(private_redis: RedisServer) -> None:
    redis = connect(private_redis.url)
    index = RedisIndex(redis, "pool")
    await use_everything(index)
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    keys = set(await redis.keys())
    # The first time the server's own buffers for scripts grow, some 100 KB, and stay.
    await _fill_and_empty(index, epoch, first_seq=0, redis=redis)
    memory = await _used_memory(redis)
    peak = await _fill_and_empty(index, epoch, first_seq=100, redis=redis)
    assert peak > memory + 400_000
    (state,) = await index.states()
    assert state.num_blocks == {"gpu": 0, "host": 0}
    assert set(await redis.keys()) - keys == {b"pf:{pool}:3:next_seqs"}

    async def is_back() -> bool:
        # A tenth of the peak: buffers of the server's own go on growing a little for a while.
        return await _used_memory(redis) < memory + 50_000

    await until(is_back)
    await index.deregister(A, epoch)
    assert sorted(await redis.keys()) == [
        *(b"pf:{pool}:3:epoch:a/0", b"pf:{pool}:3:epoch:b/0", b"pf:{pool}:3:free"),
        *(b"pf:{pool}:3:gateways", b"pf:{pool}:3:last_slot", b"pf:{pool}:3:parts"),
        *(b"pf:{pool}:3:roster", b"pf:{pool}:3:table:0:gpu", b"pf:{pool}:3:table:0:host"),
    ]
    assert 86_000 < await redis.ttl("pf:{pool}:3:epoch:a/0") <= 86_400
    await index.close()


@pytest.mark.fault("router-33")
async def test_a_replica_that_died_is_reclaimed_by_the_others(private_redis: RedisServer) -> None:
    redis = connect(private_redis.url)
    index = RedisIndex(redis, "pool")
    dead = await index.register(A, boot_ns=BOOT_NS, lease_s=0.3)
    alive = await index.register(B, boot_ns=BOOT_NS, lease_s=60)
    await index.load_snapshot(A, dead, seq=0, ops=[stored(chain(5000))])
    assert await _num_held(redis) == 5000

    async def is_gone() -> bool:
        await index.renew(B, alive, lease_s=60, report=LoadReport())
        return await _num_held(redis) == 0

    await until(is_gone)
    assert [key for key in await redis.keys() if b"a/0" in key] == [b"pf:{pool}:3:epoch:a/0"]
    await index.close()


@pytest.mark.fault("router-33")
async def test_an_abandoned_snapshot_is_reclaimed(private_redis: RedisServer) -> None:
    redis = connect(private_redis.url)
    index = RedisIndex(redis, "pool", shadow_ttl_s=0.3)
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    loading = asyncio.create_task(index.load_snapshot(A, epoch, seq=0, ops=[stored(chain(60_000))]))

    async def has_begun() -> bool:
        return bool(await redis.exists("pf:{pool}:3:table:0:gpu"))

    await until(has_begun)
    loading.cancel()
    await asyncio.wait({loading})
    assert (await index.match(chain(1)))[0].matched_blocks == 0

    async def is_gone() -> bool:
        await index.renew(A, epoch, lease_s=60, report=LoadReport())
        return await _num_held(redis) == 0

    await until(is_gone)
    await index.close()


async def _num_held(redis: Redis) -> int:
    """Count the members of all tables, those of dropped inventories included."""
    buckets = [key for key in await redis.keys() if b":held:" in key]
    return sum([await redis.scard(key) for key in buckets])


async def test_a_big_snapshot_does_not_hold_up_a_match(private_redis: RedisServer) -> None:
    """While 100,000 blocks are loaded, matches go on between the chunks, with the old content."""
    loader = RedisIndex(connect(private_redis.url), "pool")
    reader = RedisIndex(connect(private_redis.url), "pool")
    old, new = chain(3, "old"), chain(100_000)
    epoch = await loader.register(A, boot_ns=BOOT_NS, lease_s=60)
    await loader.apply(A, epoch, [SequencedOps(0, (stored(old),))])
    loading = asyncio.create_task(loader.load_snapshot(A, epoch, seq=5, ops=[stored(new)]))
    seen: list[tuple[int, int]] = []
    while not loading.done():
        seen.append(((await _matched(reader, old)), (await _matched(reader, new[:3]))))
    assert await loading
    assert len(seen) >= 3
    assert (0, 0) not in seen
    assert await _matched(reader, new) == 100_000
    await loader.close()
    await reader.close()


async def _matched(index: RedisIndex, hashes: list[bytes]) -> int:
    (match,) = await index.match(hashes)
    return match.matched_blocks


@pytest.mark.fault("router-8")
async def test_racing_ingesters_apply_every_batch_once(shared_redis: RedisServer) -> None:
    pool = f"race-{time.time_ns()}"
    indexes = [RedisIndex(connect(shared_redis.url), pool) for _ in range(2)]
    hashes = chain(60)
    epoch = await indexes[0].register(A, boot_ns=BOOT_NS, lease_s=60)
    batches = [
        SequencedOps(i, (stored(hashes[i : i + 1]), removed(hashes[i - 1 : i])))
        for i in range(1, 60)
    ]
    batches.insert(0, SequencedOps(0, (stored(hashes[:1]),)))

    async def ingest(index: RedisIndex, size: int) -> None:
        for first in range(0, len(batches), size):
            await index.apply(A, epoch, batches[first : first + size])

    await asyncio.gather(ingest(indexes[0], 1), ingest(indexes[1], 7))
    (state,) = await indexes[0].states()
    assert (state.applied_seq, state.num_blocks) == (59, {"gpu": 1, "host": 0})
    for index in indexes:
        await index.close()
