"""What one frame of an event stream means: pure decisions, used by the ingester and its tests.

It knows no sockets, no clock and no index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from kvindex.events import (
    MEDIUM_OF_TIER,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    KVEvent,
    WireHash,
)
from kvindex.foundation.errors import WireError
from kvindex.index import IndexOp, Target, Tier
from kvindex.subscriber import EventFrame
from kvindex.topic import parse_topic

Verdict = Literal["follow", "ignore", "restarted"]

_KEPT_TIERS: dict[str, Tier] = {MEDIUM_OF_TIER[tier]: tier for tier in get_args(Tier)}


@dataclass(slots=True)
class StreamPosition:
    """Which boot of which engine is followed.

    Our topics carry replica and boot. A foreign stream carries neither: there, a sequence number
    that does not grow is a restart.
    """

    target: Target
    boot_ns: int | None = None
    last_live_seq: int | None = None

    def judge(self, frame: EventFrame) -> Verdict:
        """Tell what to do with a live frame; a newer boot becomes the one that is followed."""
        if parse_topic(frame.topic) is None:
            has_gone_back = self.last_live_seq is not None and frame.seq <= self.last_live_seq
            self.last_live_seq = frame.seq
            return "restarted" if has_gone_back else "follow"
        return self.judge_replayed(frame)

    def judge_replayed(self, frame: EventFrame) -> Verdict:
        """Tell what to do with a replayed frame, whose sequence number may well go back."""
        topic = parse_topic(frame.topic)
        if topic is None:
            return "follow"
        if topic.replica_id != self.target.replica:
            return "ignore"
        if self.boot_ns is None or topic.boot_ns == self.boot_ns:
            return "follow"
        if topic.boot_ns < self.boot_ns:
            return "ignore"
        self.boot_ns = topic.boot_ns
        return "restarted"


def concerns(batch: EventBatch, target: Target) -> bool:
    """Tell whether a batch is of the target's rank; one without a rank is of any."""
    return batch.dp_rank is None or batch.dp_rank == target.dp_rank


def index_ops(batch: EventBatch) -> tuple[IndexOp, ...]:
    """Translate events to operations; tiers that the index does not keep are left out.

    Raises WireError for an integer hash outside 64 bits.
    """
    ops = [_index_op(event) for event in batch.events]
    return tuple([op for op in ops if op is not None])


def _index_op(event: KVEvent) -> IndexOp | None:
    if isinstance(event, AllBlocksCleared):
        return IndexOp(kind="cleared")
    tier = tier_of_medium(event.medium)
    if tier is None:
        return None
    return IndexOp(
        kind="stored" if isinstance(event, BlockStored) else "removed",
        hashes=_whole(event.block_hashes),
        group=event.group_idx or 0,
        tier=tier,
    )


def tier_of_medium(medium: str | None) -> Tier | None:
    """Return the index's name of a medium; an engine that names none means its GPU."""
    return _KEPT_TIERS.get(medium or "GPU")


def _whole(hashes: list[WireHash]) -> tuple[bytes, ...]:
    """Return hashes as bytes; most engines tell all of theirs so."""
    if {*map(type, hashes)} == {bytes}:
        return cast("tuple[bytes, ...]", tuple(hashes))
    return tuple(map(_hash_bytes, hashes))


def _hash_bytes(wire_hash: WireHash) -> bytes:
    if isinstance(wire_hash, bytes):
        return wire_hash
    try:
        return wire_hash.to_bytes(8, "big")
    except OverflowError:
        raise WireError(f"block hash {wire_hash}: not an unsigned 64-bit integer") from None
