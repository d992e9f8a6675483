"""Publisher and subscriber over real sockets: numbers, replay, loss that shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
import zmq.asyncio

from kvindex.events import BlockStored, EventBatch, WireHash, decode_batch
from kvindex.foundation.errors import DependencyError, WireError
from kvindex.publisher import EventPublisher
from kvindex.subscriber import EventFrame, EventSubscriber
from kvindex.topic import KvTopic, parse_topic
from tests.conditions import until
from tests.contracts.index_subject import chain
from tests.kvindex.stream_engine import store_event

TOPIC = "kv@a@17"


def batch(i: int) -> EventBatch:
    return EventBatch(float(i), [store_event(chain(2, str(i)))], 0)


@contextmanager
def publishing(
    *, max_replay_batches: int = 10_000, max_queued_batches: int = 100_000
) -> Iterator[EventPublisher]:
    publisher = EventPublisher(
        TOPIC, max_replay_batches=max_replay_batches, max_queued_batches=max_queued_batches
    )
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: EventPublisher, timeout_s: float = 2.0) -> Iterator[EventSubscriber]:
    subscriber = EventSubscriber(
        publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        replay_timeout_s=timeout_s,
    )
    try:
        yield subscriber
    finally:
        subscriber.close()


async def replayed(subscriber: EventSubscriber, from_seq: int, last_seq: int) -> list[EventFrame]:
    """Replay once the publisher's thread has got as far as `last_seq`."""
    frames: list[EventFrame] = []

    async def is_complete() -> bool:
        frames[:] = await subscriber.replay(from_seq)
        return bool(frames) and frames[-1].seq == last_seq

    await until(is_complete)
    return frames


async def test_batches_arrive_numbered_from_zero_under_the_topic() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        assert publisher.last_seq is None
        first = await _first_live_seq(publisher, subscriber)
        sent = [publisher.publish(batch(i)) for i in range(3)]
        assert sent == [first + 1, first + 2, first + 3]
        assert publisher.last_seq == first + 3
        frames: list[EventFrame] = []
        while len(frames) < 3:
            frames += await subscriber.receive(10)
        assert [frame.seq for frame in frames] == sent
        assert {frame.topic for frame in frames} == {TOPIC}
        assert [decode_batch(f.payload).batch for f in frames] == [batch(i) for i in range(3)]


async def _first_live_seq(publisher: EventPublisher, subscriber: EventSubscriber) -> int:
    """Publish until the subscription has taken effect; return the last number published."""
    receiving = asyncio.create_task(subscriber.receive(1000))
    while not receiving.done():
        publisher.publish(EventBatch(0.0, []))
        await asyncio.wait({receiving}, timeout=0.01)
    last = publisher.last_seq
    assert last is not None
    seen = receiving.result()[-1].seq
    while seen < last:
        seen = (await subscriber.receive(1000))[-1].seq
    return last


async def test_replay_gives_what_was_published_with_the_topic() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        for i in range(5):
            publisher.publish(batch(i))
        frames = await replayed(subscriber, 2, 4)
        assert [(f.topic, f.seq) for f in frames] == [(TOPIC, 2), (TOPIC, 3), (TOPIC, 4)]
        assert decode_batch(frames[0].payload).batch == batch(2)
        assert await subscriber.replay(5) == []


@pytest.mark.fault("engine-17")
async def test_replay_holds_the_last_batches_and_always_ends() -> None:
    with publishing(max_replay_batches=4) as publisher, subscribed(publisher) as subscriber:
        for i in range(10):
            publisher.publish(batch(i))
        frames = await replayed(subscriber, 0, 9)
        assert [(frame.topic, frame.seq) for frame in frames] == [(TOPIC, i) for i in (6, 7, 8, 9)]


@pytest.mark.fault("engine-17")
async def test_a_slow_reader_gets_the_whole_replay_and_its_end_marker() -> None:
    with publishing(max_replay_batches=3000) as publisher:
        with subscribed(publisher) as subscriber:
            for i in range(3000):
                publisher.publish(batch(i))
            await replayed(subscriber, 2999, 2999)
        context = zmq.asyncio.Context()
        reader = context.socket(zmq.DEALER)
        reader.setsockopt(zmq.RCVHWM, 1)
        reader.connect(publisher.replay_endpoint)
        await reader.send_multipart((b"", bytes(8)))
        seqs = []
        async with asyncio.timeout(10):
            while (frames := await reader.recv_multipart())[2] != b"\xff" * 8:
                assert frames[1] == TOPIC.encode()
                seqs.append(int.from_bytes(frames[2], "big"))
        assert frames == [b"", b"", b"\xff" * 8, b""]
        assert seqs == list(range(3000))
        context.destroy(linger=0)


@pytest.mark.fault("engine-16")
async def test_a_full_queue_never_blocks_and_the_loss_shows_as_a_gap() -> None:
    with publishing(max_queued_batches=1) as publisher, subscribed(publisher) as subscriber:
        seqs = [publisher.publish(batch(i)) for i in range(3000)]
        assert seqs == sorted(set(seqs))
        await until(lambda: publisher.num_dropped > 0)

        async def is_announced() -> bool:
            frames = await subscriber.replay(0)
            return bool(frames) and frames[-1].seq >= seqs[-1] and _missing(frames) > 0

        await until(is_announced)
        frames = await subscriber.replay(0)
        assert frames[-1].seq == publisher.last_seq
        assert _missing(frames) == publisher.num_dropped


def _missing(frames: list[EventFrame]) -> int:
    return frames[-1].seq + 1 - len(frames)


@pytest.mark.fault("router-19")
async def test_a_hash_that_does_not_fit_is_a_gap_not_a_crash() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        too_big = BlockStored(
            block_hashes=[2**256 - 1], parent_block_hash=None, token_ids=[], block_size=16
        )
        assert publisher.publish(EventBatch(0.0, [too_big])) == 0
        largest: list[WireHash] = [2**64 - 1, b"\xff" * 32]
        fitting = BlockStored(
            block_hashes=largest, parent_block_hash=None, token_ids=[], block_size=16
        )
        seq = publisher.publish(EventBatch(0.0, [fitting]))
        await replayed(subscriber, seq, publisher.last_seq or 0)
        frames = await subscriber.replay(0)
        stored = [e for f in frames for e in decode_batch(f.payload).batch.events]
        assert [e.block_hashes for e in stored if isinstance(e, BlockStored)] == [largest]
        assert 0 not in [frame.seq for frame in frames]


async def test_a_malformed_replay_request_is_ignored() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        context = zmq.asyncio.Context()
        reader = context.socket(zmq.DEALER)
        reader.connect(publisher.replay_endpoint)
        await reader.send_multipart((b"", b"short"))
        await reader.send_multipart((b"only one frame",))
        publisher.publish(batch(0))
        assert len(await replayed(subscriber, 0, 0)) == 1
        context.destroy(linger=0)


async def test_what_is_queued_is_sent_before_the_end() -> None:
    context = zmq.asyncio.Context()
    collector = context.socket(zmq.SUB)
    collector.setsockopt_string(zmq.SUBSCRIBE, "")
    publisher = EventPublisher(TOPIC)
    try:
        collector.connect(publisher.endpoint)
        while not await collector.poll(10):
            publisher.publish(EventBatch(0.0, []))
        last = [publisher.publish(batch(i)) for i in range(50)][-1]
        publisher.close()
        publisher.close()
        async with asyncio.timeout(5):
            while int.from_bytes((await collector.recv_multipart())[1], "big") < last:
                pass
    finally:
        context.destroy(linger=0)


async def test_an_endpoint_in_use_is_named() -> None:
    with publishing() as publisher:
        with pytest.raises(DependencyError) as caught:
            EventPublisher(TOPIC, endpoint=publisher.endpoint)
        assert publisher.endpoint in str(caught.value)


# A sender of arbitrary frames

Send = Callable[..., None]


@pytest.fixture
async def raw() -> AsyncIterator[tuple[zmq.asyncio.Socket, EventSubscriber]]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.XPUB)
    socket.bind("tcp://127.0.0.1:*")
    subscriber = EventSubscriber(
        socket.getsockopt_string(zmq.LAST_ENDPOINT),
        replay_endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT),
        replay_timeout_s=0.05,
    )
    await socket.recv()
    yield socket, subscriber
    subscriber.close()
    context.destroy(linger=0)


async def test_malformed_frames_are_counted_and_skipped(
    raw: tuple[zmq.asyncio.Socket, EventSubscriber],
) -> None:
    socket, subscriber = raw
    await socket.send_multipart((b"t", b"12345678", b"p", b"too many"))
    await socket.send_multipart((b"t", b"short", b"p"))
    await socket.send_multipart((b"\xff\xfe", (2**64 - 2).to_bytes(8, "big"), b"p"))
    frames = await subscriber.receive(10)
    assert [(frame.seq, frame.payload) for frame in frames] == [(2**64 - 2, b"p")]
    assert subscriber.num_malformed == 2


async def test_a_live_frame_may_come_without_a_topic(
    raw: tuple[zmq.asyncio.Socket, EventSubscriber],
) -> None:
    socket, subscriber = raw
    await socket.send_multipart(((7).to_bytes(8, "big"), b"p"))
    assert await subscriber.receive(1) == [EventFrame("", 7, b"p")]


@pytest.mark.fault("router-6")
async def test_a_replay_without_answer_is_an_error_that_says_so(
    raw: tuple[zmq.asyncio.Socket, EventSubscriber],
) -> None:
    _, subscriber = raw
    with pytest.raises(WireError, match=r"gave no complete answer within 0\.05 s"):
        await subscriber.replay(0)


async def test_an_engine_without_replay_says_so() -> None:
    subscriber = EventSubscriber("tcp://127.0.0.1:1")
    assert not subscriber.can_replay
    with pytest.raises(WireError, match="offers none"):
        await subscriber.replay(0)
    subscriber.close()


# Topics


@pytest.mark.parametrize("replica", ["replica-0", "a@b", "", "ü"])
def test_a_topic_names_replica_and_boot(replica: str) -> None:
    topic = KvTopic(replica, 1_760_000_000_000_000_123)
    assert str(topic) == f"kv@{replica}@1760000000000000123"
    assert parse_topic(str(topic)) == topic


@pytest.mark.parametrize("topic", ["", "kv", "kv@a", "kv@a@", "kv@a@-1", "kv@a@²", "x@a@1"])
def test_a_foreign_topic_tells_nothing(topic: str) -> None:
    assert parse_topic(topic) is None
