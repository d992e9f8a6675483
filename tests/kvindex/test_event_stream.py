"""What events mean to the index, and what a frame means to whoever follows a stream."""

from __future__ import annotations

import msgspec
import pytest

from kvindex.event_stream import StreamPosition, concerns, index_ops
from kvindex.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    decode_batch,
    encode_batch,
)
from kvindex.foundation.errors import WireError
from kvindex.index import IndexOp, Target
from kvindex.subscriber import EventFrame

GOLDEN = bytes.fromhex(
    "93cb3ff000000000000093de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c4"
    "0401010101b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f"
    "73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579"
    "7391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e7469"
    "6f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c40401010101a66d656469"
    "756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
GOLDEN_ARRAYS = bytes.fromhex(
    "93cb3ff00000000000009398ab426c6f636b53746f72656491c40401010101c0940102030404c0a3475055c093ac"
    "426c6f636b52656d6f76656491c40401010101a347505591b0416c6c426c6f636b73436c656172656400"
)
TOY = b"\x01\x01\x01\x01"
TOY_OPS = (
    IndexOp(kind="stored", hashes=(TOY,)),
    IndexOp(kind="removed", hashes=(TOY,)),
    IndexOp(kind="cleared"),
)


def ops(*events: KVEvent) -> tuple[IndexOp, ...]:
    return index_ops(EventBatch(0.0, list(events)))


def stored(
    *hashes: bytes | int, medium: str | None = "GPU", group_idx: int | None = None
) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        medium=medium,
        group_idx=group_idx,
    )


@pytest.mark.fault("engine-20")
@pytest.mark.fault("router-9")
def test_maps_and_arrays_of_an_engine_mean_the_same() -> None:
    maps, arrays = decode_batch(GOLDEN), decode_batch(GOLDEN_ARRAYS)
    assert index_ops(maps.batch) == TOY_OPS
    assert index_ops(arrays.batch) == TOY_OPS
    assert (maps.num_unknown_fields, arrays.num_unknown_fields) == (0, 0)


@pytest.mark.fault("engine-20")
@pytest.mark.fault("router-9")
def test_added_fields_and_events_are_counted_not_fatal() -> None:
    raw = [
        1.0,
        [
            ["BlockRemoved", [TOY], "GPU", 0, "extra", "more"],
            {"type": "BlockRemoved", "block_hashes": [TOY], "locality": "LOCAL"},
            ["BlockMoved", [TOY]],
            {"type": "BlockPinned"},
        ],
        0,
        "a trailing field of the batch",
    ]
    decoded = decode_batch(msgspec.msgpack.encode(raw))
    assert index_ops(decoded.batch) == (TOY_OPS[1], TOY_OPS[1])
    assert (decoded.num_unknown_fields, decoded.num_unknown_events) == (4, 2)


@pytest.mark.fault("engine-20")
@pytest.mark.fault("router-19")
@pytest.mark.parametrize("value", [0, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1])
def test_unsigned_hashes_become_their_eight_bytes(value: int) -> None:
    batch = decode_batch(encode_batch(EventBatch(0.0, [stored(value)]))).batch
    assert index_ops(batch) == (IndexOp(kind="stored", hashes=(value.to_bytes(8, "big"),)),)


def test_a_negative_hash_is_refused_by_value() -> None:
    with pytest.raises(WireError, match="block hash -1: not an unsigned 64-bit integer"):
        ops(stored(-1))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode({"a": 1})],
)
def test_garbage_is_an_error_that_says_where(payload: bytes) -> None:
    with pytest.raises(WireError, match="event batch: "):
        decode_batch(payload)


@pytest.mark.fault("router-7")
def test_media_become_tiers() -> None:
    assert ops(stored(b"1"), stored(b"2", medium="CPU"), stored(b"3", medium=None)) == (
        IndexOp(kind="stored", hashes=(b"1",), tier="gpu"),
        IndexOp(kind="stored", hashes=(b"2",), tier="host"),
        IndexOp(kind="stored", hashes=(b"3",), tier="gpu"),
    )
    assert ops(BlockRemoved(block_hashes=[b"1"], medium="CPU")) == (
        IndexOp(kind="removed", hashes=(b"1",), tier="host"),
    )


def test_tiers_that_the_index_does_not_keep_are_left_out() -> None:
    assert ops(stored(b"1", medium="STORAGE"), stored(b"2", medium="TAPE")) == ()


def test_groups_are_kept_apart() -> None:
    assert ops(stored(b"1", group_idx=3)) == (IndexOp(kind="stored", hashes=(b"1",), group=3),)


def test_events_keep_their_order() -> None:
    kinds = [op.kind for op in ops(stored(b"1"), AllBlocksCleared(), stored(b"1"))]
    assert kinds == ["stored", "cleared", "stored"]


@pytest.mark.fault("router-10")
@pytest.mark.parametrize(("rank", "expected"), [(None, True), (0, False), (1, True)])
def test_a_batch_concerns_the_target_of_its_rank(rank: int | None, expected: bool) -> None:
    assert concerns(EventBatch(0.0, [], rank), Target("a", 1)) == expected


def judge(position: StreamPosition, *frames: tuple[str, int]) -> list[str]:
    return [position.judge(EventFrame(topic, seq, b"")) for topic, seq in frames]


def test_a_new_boot_in_the_topic_is_a_restart() -> None:
    position = StreamPosition(Target("a"), boot_ns=10)
    frames = [("kv@a@10", 5), ("kv@a@11", 0), ("kv@a@11", 1), ("kv@a@10", 6)]
    assert judge(position, *frames) == ["follow", "restarted", "follow", "ignore"]
    assert position.boot_ns == 11


def test_a_topic_proves_that_a_sequence_going_back_is_no_restart() -> None:
    position = StreamPosition(Target("a"), boot_ns=10)
    assert judge(position, ("kv@a@10", 5), ("kv@a@10", 3)) == ["follow", "follow"]


def test_the_stream_of_another_replica_is_ignored() -> None:
    assert judge(StreamPosition(Target("a"), boot_ns=10), ("kv@b@12", 0)) == ["ignore"]


def test_a_foreign_sequence_that_goes_back_or_stands_still_is_a_restart() -> None:
    frames = [("", 7), ("", 9), ("", 9), ("", 0), ("", 1)]
    expected = ["follow", "follow", "restarted", "restarted", "follow"]
    assert judge(StreamPosition(Target("a")), *frames) == expected


def test_replayed_frames_of_a_foreign_stream_may_go_back() -> None:
    position = StreamPosition(Target("a"), last_live_seq=9)
    assert position.judge_replayed(EventFrame("", 3, b"")) == "follow"
