"""A client is told once who is in the pool, and of every change with its next match."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvindex.hit_rule import CacheLayout, GroupRule
from kvindex.index import IndexOp, LoadReport, Reservation, SequencedOps, Target
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from kvindex.redis_roster import Roster
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, CLEARED, A, B, chain, stored
from tests.redis_server import RedisServer

X = chain(20)
FULL_AND_WINDOW = CacheLayout(
    groups=(
        GroupRule(kind="full", block_size=16),
        GroupRule(kind="window", block_size=16, span=40),
    ),
    hash_block_size=16,
)


class Pool:
    """A reader that matches now and then, and a writer that the reader hears nothing of."""

    def __init__(self, url: str) -> None:
        self.reader = RedisIndex(connect(url), "pool")
        self.writer = RedisIndex(connect(url), "pool")

    async def register(self, target: Target, num_blocks: int) -> int:
        epoch = await self.writer.register(target, boot_ns=BOOT_NS, lease_s=60)
        await self.writer.apply(target, epoch, [SequencedOps(0, (stored(X[:num_blocks]),))])
        return epoch

    async def read(self) -> dict[str, int]:
        """Return what the reader finds; a new client finds the same."""
        found, afresh = await self.reader.match(X), RedisIndex(self.writer._redis, "pool")
        assert found == await afresh.match(X)
        return {str(match.target): match.matched_blocks for match in found}


@pytest.fixture
async def pool(private_redis: RedisServer) -> AsyncIterator[Pool]:
    used = Pool(private_redis.url)
    yield used
    await used.reader.close()
    await used.writer.close()


async def test_targets_that_come_and_go_are_seen(pool: Pool) -> None:
    assert await pool.read() == {}
    epoch = await pool.register(B, 3)
    assert await pool.read() == {"b/0": 3}
    await pool.register(A, 5)
    assert await pool.read() == {"a/0": 5, "b/0": 3}
    await pool.register(A, 2)
    assert await pool.read() == {"a/0": 2, "b/0": 3}
    await pool.writer.deregister(B, epoch)
    assert await pool.read() == {"a/0": 2}


async def test_another_inventory_of_the_same_epoch_is_seen(pool: Pool) -> None:
    epoch = await pool.register(A, 5)
    assert await pool.read() == {"a/0": 5}
    await pool.writer.apply(A, epoch, [SequencedOps(1, (CLEARED, stored(X[:1])))])
    assert await pool.read() == {"a/0": 1}
    await pool.writer.load_snapshot(A, epoch, seq=2, ops=[stored(X[:9])])
    assert await pool.read() == {"a/0": 9}


async def test_a_lease_that_lapses_in_silence_is_seen(pool: Pool) -> None:
    await pool.register(A, 5)
    epoch = await pool.register(B, 3)
    await pool.reader.match(X)
    await pool.writer.renew(B, epoch, lease_s=0.05, report=LoadReport())

    async def is_gone() -> bool:
        return [match.target for match in await pool.reader.match(X)] == [A]

    await until(is_gone)
    assert await pool.read() == {"a/0": 5}
    await pool.register(B, 4)
    assert await pool.read() == {"a/0": 5, "b/0": 4}


async def test_reports_are_told_as_they_are_renewed(pool: Pool) -> None:
    epochs = {target: await pool.register(target, 1) for target in (A, B)}
    assert [match.report for match in await pool.reader.match(X)] == [LoadReport(), LoadReport()]
    for target, num_running in ((A, 1), (B, 2), (A, 3)):
        report = LoadReport(mode="EXACT", num_running=num_running)
        await pool.writer.renew(target, epochs[target], lease_s=60, report=report)
    assert [match.report.num_running for match in await pool.reader.match(X)] == [3, 2]
    assert [match.report.num_running for match in await pool.reader.match(X)] == [3, 2]


async def test_a_server_that_was_emptied_is_not_taken_for_the_one_before(
    pool: Pool, private_redis: RedisServer
) -> None:
    await pool.register(A, 5)
    await pool.register(B, 6)
    assert await pool.read() == {"a/0": 5, "b/0": 6}
    private_redis.restart()
    await pool.register(B, 2)
    await pool.register(A, 1)
    assert await pool.read() == {"a/0": 1, "b/0": 2}


async def test_a_server_that_lost_the_last_renewals_is_read_anew(pool: Pool) -> None:
    epoch = await pool.register(A, 5)
    for num_running in (1, 2, 3):
        report = LoadReport(num_running=num_running)
        await pool.writer.renew(A, epoch, lease_s=60, report=report)
    await pool.reader.match(X)
    redis = pool.writer._redis
    await redis.hset("pf:{pool}:3:roster", "reports", 2)
    await redis.zadd("pf:{pool}:3:reported", {"a/0": 2})
    await redis.hset("pf:{pool}:3:reports", "a/0", msgspec.msgpack.encode(LoadReport()))
    assert [match.report.num_running for match in await pool.reader.match(X)] == [0]
    await pool.writer.renew(A, epoch, lease_s=60, report=LoadReport(num_running=9))
    assert [match.report.num_running for match in await pool.reader.match(X)] == [9]


async def test_layouts_are_remembered_with_their_targets(pool: Pool) -> None:
    epoch = await pool.writer.register(B, boot_ns=BOOT_NS, lease_s=60, layout=FULL_AND_WINDOW)
    ops = (stored(X), IndexOp(kind="stored", hashes=tuple(X[5:8]), group=1))
    await pool.writer.apply(B, epoch, [SequencedOps(0, ops)])
    await pool.register(A, 4)
    for _ in range(3):
        assert await pool.read() == {"a/0": 4, "b/0": 8}
    await pool.register(B, 2)
    assert await pool.read() == {"a/0": 4, "b/0": 2}


async def test_what_is_reserved_is_found_by_who_knows_the_targets(pool: Pool) -> None:
    await pool.register(A, 4)
    await pool.register(B, 4)
    await pool.reader.match(X)
    pending = {A: (), B: tuple(X[4:9])}
    for gateway, target in (("g1", A), ("g2", A), ("g2", B)):
        await pool.writer.touch_gateway(gateway, lease_s=60)
        await pool.writer.reserve(
            Reservation(
                request_id=f"{gateway}-{target}",
                attempt=0,
                target=target,
                gateway=gateway,
                prefill_tokens=2**33,
                num_blocks=7,
                pending=pending[target],
            )
        )
    found = [
        (match.reserved_prefill_tokens, match.num_reserved, match.pending_blocks)
        for match in await pool.reader.match(X)
    ]
    assert found == [(2**34, 2, 0), (2**33, 1, 5)]


async def test_matches_in_flight_while_targets_come_and_go_are_right(pool: Pool) -> None:
    """Each answer is of one moment, whatever the client learned meanwhile."""
    await pool.register(A, 4)

    async def reader() -> None:
        for _ in range(40):
            found = {str(m.target): m.matched_blocks for m in await pool.reader.match(X)}
            assert found.get("b/0", 7) in (0, 7)
            assert found["a/0"] == 4

    async def writer() -> None:
        for _ in range(20):
            epoch = await pool.register(B, 7)
            await pool.writer.deregister(B, epoch)

    await asyncio.gather(writer(), *(reader() for _ in range(4)))
    assert await pool.read() == {"a/0": 4}


def test_an_answer_that_was_overtaken_changes_no_report() -> None:
    older, newer = LoadReport(num_running=1), LoadReport(num_running=2)
    packed = [msgspec.msgpack.encode(report) for report in (LoadReport(), older, newer)]
    roster = Roster(b"1@2", [[b"a/0"], [b"5"], [b"1"], [None], packed[:1]], last_report=1)
    roster.update(3, [b"a/0", packed[2], b"gone/0", packed[1]])
    roster.update(2, [b"a/0", packed[1]])
    assert roster.known(None)[1] == 3
    assert roster._reports == [newer]
