"""How inventories lie in Redis: compact at every size, split evenly, swept once dropped."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis

from kvindex.foundation.errors import DependencyError
from kvindex.index import LoadReport, SequencedOps, Target
from kvindex.redis_connect import connect
from kvindex.redis_index import HeldBlocks, RedisIndex
from tests.contracts.index_subject import BOOT_NS, CLEARED, A, B, chain, removed, stored
from tests.redis_server import RedisServer, running_server, valkey_binary

MAX_COMPACT = 512
"""The server's default of set-max-intset-entries."""


@pytest.fixture(params=["redis", "valkey"])
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    binary = valkey_binary() if request.param == "valkey" else None
    with running_server(binary) as server:
        client = connect(server.url)
        yield client
        await client.aclose()


def digests(count: int, seed: int = 0) -> list[bytes]:
    """Return random digests: far quicker to make than hashed ones."""
    packed = random.Random(seed).randbytes(32 * count)
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


async def buckets(redis: Redis) -> list[bytes]:
    return [key async for key in redis.scan_iter("pf:*:held:*")]


async def memory(redis: Redis) -> int:
    return int((await redis.info("memory"))["used_memory"])


async def store(index: RedisIndex, epoch: int, hashes: Sequence[bytes], *, per_batch: int) -> None:
    for seq, first in enumerate(range(0, len(hashes), per_batch)):
        op = stored(hashes[first : first + per_batch])
        result = await index.apply(A, epoch, [SequencedOps(seq, (op,))])
        assert result.status == "applied"


async def swept(index: RedisIndex, target: Target, epoch: int, *, pool: str = "pool") -> None:
    """Renew until everything that was dropped is swept out."""
    while await index._redis.exists(f"pf:{{{pool}}}:3:dropped", f"pf:{{{pool}}}:3:sweeping"):
        assert await index.renew(target, epoch, lease_s=60, report=LoadReport())


@pytest.mark.parametrize("per_batch", [7, 1000])
async def test_a_growing_inventory_stays_in_compact_sets_and_loses_nothing(
    shared_redis: RedisServer, per_batch: int
) -> None:
    redis = connect(shared_redis.url)
    await redis.flushall()
    index = RedisIndex(redis, f"growing-{per_batch}")
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    hashes = digests(5000)
    await store(index, epoch, hashes, per_batch=per_batch)
    held = await buckets(redis)
    assert len(held) == 40
    assert {await redis.object("ENCODING", key) for key in held} == {b"intset"}
    assert max([await redis.scard(key) for key in held]) <= MAX_COMPACT
    assert sum([await redis.scard(key) for key in held]) == 5000
    (match,) = await index.match(hashes)
    assert match.matched_blocks == 5000
    await index.close()


async def test_a_block_costs_less_than_twelve_bytes(redis: Redis) -> None:
    """The documented cost (docs/decisions/0001): at most 12 bytes per block and replica, all in."""
    index = RedisIndex(redis, "pool")
    epochs = [
        await index.register(target, boot_ns=BOOT_NS, lease_s=60)
        for target in (A, B, Target("c", 1))
    ]
    before = await memory(redis)
    for i, target in enumerate((A, B, Target("c", 1))):
        assert await index.load_snapshot(
            target, epochs[i], seq=0, ops=[stored(digests(40_000, seed=i))]
        )
    usage = sum([await redis.memory_usage(key) or 0 for key in await buckets(redis)])
    assert 8 < usage / 120_000 < 11
    assert 8 < (await memory(redis) - before) / 120_000 < 12
    await index.close()


async def test_a_snapshot_replaces_the_one_before_without_a_trace(redis: Redis) -> None:
    index = RedisIndex(redis, "pool")
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    for seed in range(4):
        assert await index.load_snapshot(A, epoch, seq=0, ops=[stored(digests(3000, seed=seed))])
        await swept(index, A, epoch)
    assert sum([await redis.scard(key) for key in await buckets(redis)]) == 3000
    assert await redis.get("pf:{pool}:3:last_slot") == b"2"
    assert (await index.match(digests(3000, seed=3)))[0].matched_blocks == 3000
    await index.close()


async def test_clearing_is_seen_at_once_and_swept_by_and_by(redis: Redis) -> None:
    index = RedisIndex(redis, "pool")
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    await store(index, epoch, digests(4000), per_batch=4000)
    again = digests(4000)[:10]
    await index.apply(A, epoch, [SequencedOps(1, (CLEARED, stored(again)))])
    assert (await index.match(digests(4000)))[0].matched_blocks == 10
    assert (await index.states())[0].num_blocks == {"gpu": 10, "host": 0}
    await swept(index, A, epoch)
    assert sum([await redis.scard(key) for key in await buckets(redis)]) == 10
    assert (await index.match(digests(4000)))[0].matched_blocks == 10
    await index.close()


async def test_a_sweep_meets_the_buckets_that_are_split_meanwhile(redis: Redis) -> None:
    index = RedisIndex(redis, "pool")
    old = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    await store(index, old, digests(4000), per_batch=4000)
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    assert await redis.exists("pf:{pool}:3:sweeping")
    await store(index, epoch, digests(9000, seed=1), per_batch=500)
    await swept(index, A, epoch)
    assert sum([await redis.scard(key) for key in await buckets(redis)]) == 9000
    assert await redis.hget("pf:{pool}:3:table:0:gpu", "members") == b"9000"
    assert (await index.match(digests(9000, seed=1)))[0].matched_blocks == 9000
    await index.close()


async def test_slots_at_all_borders_have_members_of_their_own(shared_redis: RedisServer) -> None:
    """1,842 inventories fit: each credits itself and no other; one more is refused, named."""
    redis = connect(shared_redis.url)
    index = RedisIndex(redis, "slots")
    slots = [1, 2, 920, 921, 922, 923, 1841, 1842]
    hashes = chain(len(slots))
    for slot, block_hash in zip(slots, hashes, strict=True):
        await redis.set("pf:{slots}:3:last_slot", slot - 1)
        target = Target(f"r{slot}")
        epoch = await index.register(target, boot_ns=1, lease_s=600)
        await index.apply(target, epoch, [SequencedOps(0, (stored([block_hash]),))])
    for slot, block_hash in zip(slots, hashes, strict=True):
        holders = [m.target for m in await index.match([block_hash]) if m.matched_blocks]
        assert holders == [Target(f"r{slot}")]
    with pytest.raises(DependencyError, match="all 1842 inventories of the pool are in use"):
        await index.register(Target("one more"), boot_ns=1, lease_s=600)
    await index.deregister(Target("r1"), 1)
    await swept(index, Target("r2"), 1, pool="slots")
    await index.register(Target("one more"), boot_ns=1, lease_s=600)
    await index.close()


async def test_a_hash_given_thousands_of_times_is_held_once(shared_redis: RedisServer) -> None:
    redis = connect(shared_redis.url)
    index = RedisIndex(redis, "repeated")
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    many = chain(1) * 20_000
    assert (await index.apply(A, epoch, [SequencedOps(0, (stored(many),))])).status == "applied"
    assert (await index.states())[0].num_blocks == {"gpu": 1, "host": 0}
    assert (await index.apply(A, epoch, [SequencedOps(1, (removed(many),))])).status == "applied"
    assert (await index.states())[0].num_blocks == {"gpu": 0, "host": 0}
    await index.close()


async def test_an_inspection_names_what_is_missing(shared_redis: RedisServer) -> None:
    index = RedisIndex(connect(shared_redis.url), "inspected")
    epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
    hashes = chain(6000)
    await index.load_snapshot(A, epoch, seq=4, ops=[stored(hashes[:3000]), stored(hashes[4000:])])
    found = await index.held(A, stored(hashes))
    assert found == HeldBlocks(epoch=epoch, applied_seq=4, missing=tuple(hashes[3000:4000]))
    assert await index.held(A, stored([])) == HeldBlocks(epoch=epoch, applied_seq=4, missing=())
    on_host = await index.held(A, stored(hashes[:2], tier="host"))
    assert on_host == HeldBlocks(epoch=epoch, applied_seq=4, missing=tuple(hashes[:2]))
    assert await index.held(B, stored(hashes)) is None
    await index.close()


async def test_a_prompt_that_a_large_fleet_shares_stays_compact(redis: Redis) -> None:
    """96 replicas hold the same 100 blocks: what they share is spread over buckets."""
    index = RedisIndex(redis, "pool")
    hashes = chain(100)
    for i in range(96):
        target = Target(f"r{i}")
        epoch = await index.register(target, boot_ns=1, lease_s=600)
        await index.load_snapshot(target, epoch, seq=0, ops=[stored(hashes[: i + 5])])
    held = await buckets(redis)
    encodings = [await redis.object("ENCODING", key) for key in held]
    assert encodings.count(b"intset") >= 0.9 * len(held) > 30
    matched = {m.target: m.matched_blocks for m in await index.match(hashes)}
    assert matched == {Target(f"r{i}"): min(i + 5, 100) for i in range(96)}
    await index.close()
