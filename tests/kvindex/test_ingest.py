"""The ingester keeps the index equal to the engine, whatever happens to frames."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvindex.events import EventBatch
from kvindex.foundation.errors import DependencyError
from kvindex.memory_index import AsyncMemoryIndex
from kvindex.snapshot import SnapshotData
from tests.conditions import until
from tests.contracts.index_subject import BOOT_NS, A
from tests.kvindex.following import X, following
from tests.kvindex.stream_engine import StreamEngine, store_event


async def test_it_starts_from_a_snapshot_and_follows_the_events(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    await engine.store(X[:5], delivered=False)
    async with following(engine, index) as follow:
        await follow.exact_with(5)
        assert follow.ingester.epoch == BOOT_NS
        await engine.store(X[5:9])
        await follow.exact_with(9)
        await engine.remove(X[7:9])
        await follow.exact_with(7)
        await engine.clear()
        await follow.exact_with(0)
        counters = follow.ingester.counters
        assert (counters.num_snapshots, counters.num_batches, counters.num_gaps) == (1, 3, 0)


@pytest.mark.fault("router-3")
async def test_a_gap_is_replayed(engine: StreamEngine, index: AsyncMemoryIndex) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await engine.store(X[:20])
        await follow.exact_with(20)
        await engine.remove(X[10:20], delivered=False)
        await engine.remove(X[5:10], delivered=False)
        await engine.publish(EventBatch(0.0, []))
        await follow.exact_with(5)
        counters = follow.ingester.counters
        assert (counters.num_gaps, counters.num_replays, counters.num_failed_replays) == (1, 1, 0)
        assert counters.num_snapshots == 1


@pytest.mark.fault("router-3")
async def test_a_gap_of_many_batches_is_replayed(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        for i in range(100):
            await engine.store(X[i : i + 1])
        await follow.exact_with(100)
        for i in range(100, 110):
            await engine.store(X[i : i + 1], delivered=False)
        for i in range(110, 115):
            await engine.store(X[i : i + 1])
        await follow.exact_with(115)
        assert follow.ingester.counters.num_snapshots == 1


@pytest.mark.fault("router-3")
@pytest.mark.fault("engine-17")
async def test_a_gap_beyond_the_replay_buffer_is_rebuilt_from_a_snapshot(
    index: AsyncMemoryIndex,
) -> None:
    engine = StreamEngine(boot_ns=BOOT_NS, max_replay=4)
    async with following(engine, index, renew_s=5.0) as follow:
        await engine.store(X[:3])
        await follow.exact_with(3)
        for i in range(3, 13):
            await engine.store(X[i : i + 1], delivered=i == 12)
        await follow.exact_with(13)
        counters = follow.ingester.counters
        assert (counters.num_replays, counters.num_failed_replays) == (1, 1)
        assert counters.num_snapshots == 2
    await engine.close()


@pytest.mark.fault("router-6")
async def test_replay_without_topic_frames_is_understood(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    engine.replays_topic = False
    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        await engine.store(X[:4], delivered=False)
        await engine.store(X[4:6])
        await follow.exact_with(6)
        assert follow.ingester.counters.num_failed_replays == 0
        assert follow.ingester.counters.num_snapshots == 1


@pytest.mark.fault("router-6")
async def test_a_replay_that_is_never_answered_ends_in_a_snapshot(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    engine.answers_replay = False
    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        await engine.store(X[:4], delivered=False)
        await engine.store(X[4:6])
        await until(lambda: follow.ingester.mode == "DEGRADED")
        assert follow.ingester.reason == "event batches are missing from sequence number 0 on"
        await follow.exact_with(6)
        assert follow.ingester.counters.num_failed_replays == 1
        assert follow.ingester.counters.num_snapshots == 2


async def test_an_engine_without_replay_is_repaired_by_a_snapshot(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, has_replay=False) as follow:
        await follow.exact_with(0)
        await engine.store(X[:4], delivered=False)
        await engine.store(X[4:6])
        await follow.exact_with(6)
        assert engine.num_replay_requests == 0


@pytest.mark.fault("router-5")
async def test_an_engine_whose_events_never_come_is_reported_and_repaired_by_snapshots(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=0.05) as follow:
        await follow.exact_with(0)
        engine.answers_replay = False
        await engine.store(X[:4], delivered=False)
        await until(lambda: follow.ingester.mode == "DEGRADED")
        assert follow.ingester.reason.startswith("no events come: replay: ")
        await follow.exact_with(4)
        await engine.store(X[4:6], delivered=False)
        await follow.exact_with(6)


async def test_a_lost_last_batch_is_found_by_asking(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=0.05) as follow:
        await follow.exact_with(0)
        await engine.store(X[:4], delivered=False)
        await follow.exact_with(4)
        assert follow.ingester.counters.num_snapshots == 1


async def test_duplicated_and_reordered_frames_change_nothing(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await engine.store(X[:4])
        await engine.remove(X[2:4])
        await engine.send_again(0)
        await engine.send_again(1)
        await engine.store(X[2:3], delivered=False)
        await engine.store(X[3:4])
        await engine.send_again(2)
        await engine.store(X[4:5])
        await follow.exact_with(5)
        assert follow.ingester.epoch == BOOT_NS
        assert follow.ingester.counters.num_registrations == 1


@pytest.mark.fault("router-1")
async def test_a_restart_is_seen_by_the_boot_in_the_topic(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await engine.store(X[:50])
        await follow.exact_with(50)
        engine.reboot(boot_ns=BOOT_NS + 7)
        await engine.store(X[:1])
        await follow.exact_with(1)
        assert follow.ingester.epoch == BOOT_NS + 7


@pytest.mark.fault("router-1")
async def test_a_restart_is_seen_by_a_sequence_that_goes_back(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    engine.topic = ""
    async with following(engine, index, renew_s=5.0) as follow:
        for i in range(50):
            await engine.store(X[i : i + 1])
        await follow.exact_with(50)
        engine.reboot(boot_ns=BOOT_NS + 7)
        await engine.store(X[:1])
        await follow.exact_with(1)
        assert follow.ingester.epoch == BOOT_NS + 7


@pytest.mark.fault("router-1")
async def test_a_restart_is_seen_in_a_replay(engine: StreamEngine, index: AsyncMemoryIndex) -> None:
    async with following(engine, index, renew_s=0.05) as follow:
        await engine.store(X[:1])
        await follow.exact_with(1)
        engine.reboot(boot_ns=BOOT_NS + 7)
        await engine.publish(EventBatch(0.0, []), delivered=False)
        await engine.store(X[:3], delivered=False)
        await follow.exact_with(3)
        assert follow.ingester.epoch == BOOT_NS + 7


@pytest.mark.fault("router-1")
async def test_a_restart_whose_first_batch_is_lost_is_seen_by_asking(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=0.05) as follow:
        for i in range(3):
            await engine.store(X[i : i + 1])
        await follow.exact_with(3)
        engine.reboot(boot_ns=BOOT_NS + 7)
        await engine.store(X[:2], delivered=False)
        await follow.exact_with(2)
        assert follow.ingester.epoch == BOOT_NS + 7
        assert follow.ingester.counters.num_snapshots == 2


@pytest.mark.fault("router-1")
async def test_the_old_inventory_is_gone_before_the_new_snapshot_is_there(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await engine.store(X[:50])
        await follow.exact_with(50)
        engine.reboot(boot_ns=BOOT_NS + 7)
        wanted, given = asyncio.Event(), asyncio.Event()
        take = engine.snapshot

        async def slow_snapshot() -> SnapshotData:
            wanted.set()
            await given.wait()
            return await take()

        follow.ingester._source = msgspec.structs.replace(
            follow.ingester._source, snapshot=slow_snapshot
        )
        await engine.store(X[:2])
        await wanted.wait()
        assert await follow.matched() == 0
        assert follow.ingester.mode == "DEGRADED"
        given.set()
        await follow.exact_with(2)


async def test_late_frames_of_an_earlier_boot_are_ignored(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        engine.topic = f"kv@a@{BOOT_NS - 1}"
        await engine.publish(EventBatch(0.0, [store_event(X[:9])]))
        engine.topic = f"kv@other@{BOOT_NS + 1}"
        await engine.publish(EventBatch(0.0, [store_event(X[:9])]))
        engine.topic, engine.next_seq = f"kv@a@{BOOT_NS}", 0
        await engine.store(X[:2])
        await follow.exact_with(2)
        assert follow.ingester.counters.num_ignored_frames == 2


@pytest.mark.fault("router-2")
async def test_blocks_without_known_parents_are_never_roots(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    """The index is new and the first event it would see is the fourth block of a chain."""
    await engine.store(X[:3], delivered=False)
    async with following(engine, index, renew_s=5.0, has_replay=False) as follow:
        await follow.exact_with(3)
        epoch = await index.register(A, boot_ns=BOOT_NS, lease_s=60)
        await engine.store(X[3:6])
        await follow.exact_with(6)
        assert follow.ingester.epoch == epoch + 1


@pytest.mark.fault("router-9")
async def test_undecodable_and_unknown_content_is_counted_and_repaired(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        await engine.publish_raw(
            msgspec.msgpack.encode(
                [
                    1.0,
                    [["BlockStored", X[:1], None, [], 16, *[None] * 4, 0, None, None, "new"]],
                    0,
                ]
            )
        )
        await engine.publish_raw(
            msgspec.msgpack.encode(
                [
                    1.0,
                    [{"type": "BlockRemoved", "block_hashes": [b"?"], "colour": 1}, {"type": "Z"}],
                ]
            )
        )
        await follow.exact_with(1)
        await until(lambda: follow.ingester.counters.num_unknown_fields == 2)
        assert follow.ingester.counters.num_unknown_events == 1
        assert follow.ingester.counters.num_snapshots == 1
        engine.held += X[:3]
        await engine.publish_raw(b"\xc1 garbage")
        await follow.exact_with(3)
        assert follow.ingester.counters.num_undecodable == 1
        assert follow.ingester.counters.num_snapshots == 2


@pytest.mark.fault("router-10")
async def test_batches_of_another_rank_are_not_credited(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        await engine.publish(EventBatch(0.0, [store_event(X[:9])], 1))
        engine.next_seq = 0
        await engine.store(X[:2])
        await follow.exact_with(2)
        assert follow.ingester.counters.num_ignored_frames == 1


async def test_a_rebuild_replaces_what_the_index_holds(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await engine.store(X[:9])
        await follow.exact_with(9)
        engine.held = X[:4]  # As if events had been wrong.
        assert await asyncio.wait_for(follow.ingester.rebuild(), 2) == 4
        assert await follow.matched() == 4
        assert follow.ingester.mode == "EXACT"
        assert follow.ingester.epoch == BOOT_NS
        await engine.store(X[4:6])
        await follow.exact_with(6)


async def test_a_rebuild_that_fails_says_why_and_goes_on_being_tried(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        follow.is_alive = False
        with pytest.raises(DependencyError, match="the engine core of a/0 shows no heartbeat"):
            await asyncio.wait_for(follow.ingester.rebuild(), 2)
        engine.held = X[:4]
        follow.is_alive = True
        await follow.exact_with(4)


async def test_a_rebuild_ends_with_its_ingester(
    engine: StreamEngine, index: AsyncMemoryIndex
) -> None:
    forever = asyncio.Event()

    async def stuck_snapshot() -> SnapshotData:
        await forever.wait()
        raise AssertionError("unreachable")

    async with following(engine, index, renew_s=5.0) as follow:
        await follow.exact_with(0)
        follow.ingester._source = msgspec.structs.replace(
            follow.ingester._source, snapshot=stuck_snapshot
        )
        asked = asyncio.create_task(follow.ingester.rebuild())
        await until(lambda: follow.ingester.mode == "DEGRADED")
    with pytest.raises(DependencyError, match="stops following"):
        await asked
