"""The event stream of a foreign engine, retold as if the engine were one of ours.

`kvindex/ingest.py` follows it like any other: it gives boots, sequence numbers and snapshots of its
own. A foreign stream carries no boot, so what may be a restart is taken for one unless the
engine's replay buffer still holds, byte for byte, the last batch that was seen. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvindex.events import (
    MEDIUM_OF_TIER,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    WireHash,
    decode_batch,
    encode_batch,
)
from kvindex.foreign_inventory import ForeignInventory
from kvindex.foundation.clock import Clock
from kvindex.foundation.errors import WireError
from kvindex.hit_rule import CacheLayout
from kvindex.index import IndexOp
from kvindex.ingest_source import Trust
from kvindex.ingest_state import ForeignStreamCounters
from kvindex.snapshot import SnapshotData
from kvindex.subscriber import EventFrame, EventSubscriber
from kvindex.topic import KvTopic

logger = logging.getLogger("prefixfleet.kvindex.foreign")

QUIET_S = 2.0
MAX_DIGESTS = 10_000
"""Digests kept to tell a frame that comes twice from one of a new boot."""


class ForeignStream:
    """Follows one foreign engine core; `receive` and `snapshot` are for an `Ingester`.

    `rank` None takes batches of every data-parallel rank for its own. What is known is complete
    from the first batch of a boot on, or from a replay that reaches back to it; otherwise only
    chains that are announced anew from their first block are credited. Belongs to one event loop;
    the subscriber is closed with it.
    """

    can_replay = False

    def __init__(
        self,
        replica_id: str,
        *,
        subscriber: EventSubscriber,
        inventory: ForeignInventory,
        clock: Clock,
        rank: int | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.counters = ForeignStreamCounters()
        self._replica_id = replica_id
        self._subscriber = subscriber
        self._inventory = inventory
        self._clock = clock
        self._rank = rank
        self._quiet_s = quiet_s
        self._wait_s = 0.0
        self._boot_ns = self._now_ns()
        self._next_own_seq = 0
        self._last_seq: int | None = None
        self._digests: OrderedDict[int, bytes] = OrderedDict()
        self._is_heard = False
        self._lost_reason: str | None = None
        self._ready: list[EventFrame] = []
        self._told_trust = self.trust
        self._told_layout = self.layout
        self._receiving: asyncio.Task[list[EventFrame]] | None = None
        self._losing: asyncio.Task[None] | None = None

    @property
    def trust(self) -> Trust:
        """How far the stream can be trusted now."""
        if not self._is_heard:
            return Trust("FALLBACK", "it has published no KV events yet")
        reason = self._lost_reason or self._inventory.limitation
        return Trust("EXACT") if reason is None else Trust("DEGRADED", reason)

    @property
    def layout(self) -> CacheLayout | None:
        """The engine's cache groups as its events tell of them; see ForeignInventory."""
        return self._inventory.layout

    async def snapshot(self) -> SnapshotData:
        """Return what is credited now, as of the last batch given out."""
        return SnapshotData(
            boot_ns=self._boot_ns, seq=self._next_own_seq - 1, ops=self._inventory.snapshot()
        )

    async def receive(self, limit: int) -> list[EventFrame]:
        """Wait for changes; return at most `limit` batches of them, in order."""
        while not self._ready:
            await self._advance(limit)
            if self.trust != self._told_trust:
                self._told_trust = self.trust
                self._give(())  # Whoever follows is to look at it now.
        ready, self._ready = self._ready[:limit], self._ready[limit:]
        return ready

    async def replay(self, from_seq: int) -> list[EventFrame]:
        """Raise WireError: a snapshot serves instead."""
        raise WireError(f"replay from {from_seq}: a retold stream offers none")

    async def close(self) -> None:
        """Stop waiting and close the subscriber."""
        waiting = [task for task in (self._receiving, self._losing) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        self._subscriber.close()

    # Waiting

    async def _advance(self, limit: int) -> None:
        """Take what comes next: frames, the loss of the connection, or silence."""
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._subscriber.receive(limit))
        if self._losing is None:
            self._losing = asyncio.create_task(self._subscriber.connection_lost())
        done, _ = await asyncio.wait(
            {self._receiving, self._losing},
            timeout=self._wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        self._wait_s = self._quiet_s
        if self._receiving in done:
            # Before a loss: what is queued came over the connection that was lost.
            frames, self._receiving = self._receiving.result(), None
            for frame in frames:
                await self._judge(frame)
        elif self._losing in done:
            self._losing = None
            self.counters.num_disconnects += 1
            if self._is_heard and not await self._catch_up():
                await self._attach(lost="the connection to its events broke: it may have restarted")
        else:
            await self._look_after_silence()

    async def _look_after_silence(self) -> None:
        """Ask a quiet engine for what it published last: a lost last batch shows no gap."""
        if self._last_seq is None:
            await self._attach(lost=self._lost_reason)
            return
        frames = await self._replayed(self._last_seq)
        if frames is not None and not self._continue(frames):
            await self._attach(lost="the engine restarted")

    # Judging

    async def _judge(self, frame: EventFrame) -> None:
        """Take a live frame if it is next; repair what its number says was lost."""
        last = self._last_seq
        if not self._concerns(frame) or self._is_known(frame):
            return
        if last is None:
            if frame.seq > 0:
                await self._attach(lost=f"its events before number {frame.seq} were never seen")
        elif frame.seq <= last:
            await self._attach(lost="the engine restarted")
        elif frame.seq > last + 1:
            self.counters.num_gaps += 1
            if not await self._catch_up():
                await self._attach(lost=f"its events {last + 1} to {frame.seq - 1} are lost")
        if self._is_known(frame):
            return
        if self._last_seq is None and frame.seq == 0:
            self._lost_reason = None  # Nothing of this boot was missed.
        elif self._last_seq is not None and frame.seq != self._last_seq + 1:
            # The engine answered from another boot than the frame is of; the next look will tell.
            self._forget()
            self._lost_reason = "its events and its replays do not fit together"
        self._is_heard = True
        self._take([frame])

    async def _catch_up(self) -> bool:
        """Fetch what was missed; False unless the engine is proved to be the same process."""
        if self._last_seq is None:
            return False
        frames = await self._replayed(self._last_seq)
        return frames is not None and self._continue(frames)

    def _continue(self, frames: Sequence[EventFrame]) -> bool:
        """Take a replay that begins with the very batch that was seen last; False for another."""
        if not frames or frames[0].seq != self._last_seq or not self._is_known(frames[0]):
            return False
        self.counters.num_replays += 1
        self._take(frames[1:])
        return True

    async def _attach(self, *, lost: str | None) -> None:
        """Start over: forget everything, and take all that the engine still can replay.

        `lost` says what is not known any more, should the replay not reach back to the start.
        """
        self._forget()
        frames = await self._replayed(0)
        if frames is None:
            self._lost_reason = lost
            return
        self._is_heard = True
        self.counters.num_replays += 1
        if not frames or frames[0].seq == 0:
            self._lost_reason = None  # Nothing of this boot was missed.
        else:
            self._lost_reason = lost or f"its events before number {frames[0].seq} are lost"
        self._take(frames)

    async def _replayed(self, from_seq: int) -> list[EventFrame] | None:
        """Return what the engine replays for our rank, None when it does not."""
        if not self._subscriber.can_replay:
            return None
        try:
            frames = await self._subscriber.replay(from_seq)
        except WireError as error:
            self.counters.num_failed_replays += 1
            logger.warning("replica=%s %s", self._replica_id, error)
            return None
        return [frame for frame in frames if self._concerns(frame)]

    def _concerns(self, frame: EventFrame) -> bool:
        """Tell whether a frame is of our rank; one that cannot be read counts as ours."""
        if self._rank is None:
            return True
        try:
            rank = decode_batch(frame.payload).batch.dp_rank
        except WireError:
            return True
        return rank is None or rank == self._rank

    def _is_known(self, frame: EventFrame) -> bool:
        return self._digests.get(frame.seq) == _digest(frame)

    # Taking

    def _take(self, frames: Iterable[EventFrame]) -> None:
        """Apply frames in order, whatever is missing between them."""
        for frame in frames:
            self._last_seq = frame.seq
            self._digests[frame.seq] = _digest(frame)
            if len(self._digests) > MAX_DIGESTS:
                self._digests.popitem(last=False)
            try:
                decoded = decode_batch(frame.payload)
                ops = self._inventory.apply(decoded.batch)
            except (WireError, ValueError) as error:  # The latter: tokens that are none.
                self.counters.num_undecodable += 1
                self._drop_inventory()
                self._lost_reason = f"its event batch {frame.seq} cannot be read: {error}"
                continue
            self.counters.num_batches += 1
            self.counters.num_unknown_fields += decoded.num_unknown_fields
            self.counters.num_unknown_events += decoded.num_unknown_events
            if any(isinstance(event, AllBlocksCleared) for event in decoded.batch.events):
                self._lost_reason = None  # From here on nothing is unknown.
            if self.layout != self._told_layout:
                self._told_layout = self.layout
                self._begin_boot()
            elif ops:
                self._give(ops)

    def _forget(self) -> None:
        """Forget the engine's boot, and what it held."""
        self._last_seq = None
        self._digests.clear()
        self._drop_inventory()

    def _drop_inventory(self) -> None:
        if self._inventory.num_blocks:
            self._inventory.clear()
            self._begin_boot()

    def _begin_boot(self) -> None:
        """Begin a boot of our own: the index drops everything in one step, and takes a snapshot."""
        self._boot_ns = max(self._boot_ns + 1, self._now_ns())
        self._ready.clear()
        self._give(())

    def _give(self, ops: Sequence[IndexOp]) -> None:
        batch = EventBatch(self._clock.now(), [_event(op) for op in ops])
        topic = str(KvTopic(self._replica_id, self._boot_ns))
        self._ready.append(EventFrame(topic, self._next_own_seq, encode_batch(batch)))
        self._next_own_seq += 1

    def _now_ns(self) -> int:
        return int(self._clock.now() * 1e9)


def _digest(frame: EventFrame) -> bytes:
    return hashlib.blake2b(frame.payload, digest_size=8).digest()


def _event(op: IndexOp) -> KVEvent:
    if op.kind == "cleared":
        return AllBlocksCleared()
    hashes: list[WireHash] = [*op.hashes]
    medium = MEDIUM_OF_TIER[op.tier]
    if op.kind == "removed":
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=op.group)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=1,
        medium=medium,
        group_idx=op.group,
    )
