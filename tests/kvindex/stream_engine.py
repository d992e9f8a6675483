"""An engine reduced to its event stream: it holds hashes, publishes, and can lose its own frames.

What a frame carries, whether it is delivered, and how replay answers is the test's choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvindex.index import IndexOp
from kvindex.publisher import END_SEQ
from kvindex.snapshot import SnapshotData
from kvindex.topic import KvTopic

DEADLINE_S = 10.0


def store_event(hashes: Sequence[bytes], medium: str = "GPU") -> BlockStored:
    """Return the event of a run of blocks, as ours are: without tokens."""
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        medium=medium,
    )


class StreamEngine:
    """A publisher of KV events, on endpoints of its own, that outlives the boots of its engine.

    `topic` None leaves the topic empty, as a foreign engine does. `replays_topic` False leaves
    the topic frame out of replays, `answers_replay` False leaves them unanswered.
    """

    def __init__(self, *, boot_ns: int, replica: str = "a", max_replay: int = 1000) -> None:
        self.boot_ns = boot_ns
        self.topic = str(KvTopic(replica, boot_ns))
        self.replays_topic = True
        self.answers_replay = True
        self.num_replay_requests = 0
        self.num_snapshots = 0
        self.held: list[bytes] = []
        self.next_seq = 0
        self._replica = replica
        self._max_replay = max_replay
        self._buffer: list[tuple[int, bytes]] = []
        self._context = zmq.asyncio.Context()
        self._publish = self._context.socket(zmq.XPUB)
        self._publish.bind("tcp://127.0.0.1:*")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind("tcp://127.0.0.1:*")
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replaying = asyncio.create_task(self._answer_replays())

    async def subscribed(self) -> None:
        """Wait until a subscriber is there."""
        async with asyncio.timeout(DEADLINE_S):
            await self._publish.recv()

    async def store(self, hashes: Sequence[bytes], *, delivered: bool = True) -> None:
        """Hold more blocks and publish a batch about it."""
        self.held += hashes
        await self.publish(EventBatch(0.0, [store_event(hashes)]), delivered=delivered)

    async def remove(self, hashes: Sequence[bytes], *, delivered: bool = True) -> None:
        """Evict blocks and publish a batch about it."""
        self.held = [block_hash for block_hash in self.held if block_hash not in hashes]
        event = BlockRemoved(block_hashes=list(hashes))
        await self.publish(EventBatch(0.0, [event]), delivered=delivered)

    async def clear(self, *, delivered: bool = True) -> None:
        """Forget all blocks and publish a batch about it."""
        self.held = []
        await self.publish(EventBatch(0.0, [AllBlocksCleared()]), delivered=delivered)

    async def publish(self, batch: EventBatch, *, delivered: bool = True) -> None:
        """Number a batch, remember it for replay, and send it unless it gets lost."""
        await self.publish_raw(encode_batch(batch), delivered=delivered)

    async def publish_raw(self, payload: bytes, *, delivered: bool = True) -> None:
        """Publish any bytes under the next sequence number."""
        seq = self.next_seq
        self.next_seq += 1
        self._buffer = [*self._buffer, (seq, payload)][-self._max_replay :]
        if delivered:
            await self.send(seq, payload)

    async def send_again(self, seq: int) -> None:
        """Deliver a remembered batch (again, or late)."""
        await self.send(seq, dict(self._buffer)[seq])

    async def send(self, seq: int, payload: bytes) -> None:
        """Deliver a frame of any number and content."""
        await self._publish.send_multipart((self.topic.encode(), seq.to_bytes(8, "big"), payload))

    def reboot(self, *, boot_ns: int) -> None:
        """Start again, empty, from sequence number 0, on the same endpoints."""
        self.boot_ns = boot_ns
        if self.topic:
            self.topic = str(KvTopic(self._replica, boot_ns))
        self.held, self._buffer, self.next_seq = [], [], 0

    async def break_connections(self) -> None:
        """Close every subscriber's connection and wait until they are back."""
        endpoint = self.endpoint
        self._publish.close(linger=0)
        self._publish = self._context.socket(zmq.XPUB)
        await self._bind_again(endpoint)
        await self.subscribed()

    async def _bind_again(self, endpoint: str) -> None:
        """Bind once the old socket has let go of the port."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    self._publish.bind(endpoint)
                    return
                except zmq.ZMQError:
                    await asyncio.sleep(0.005)

    async def snapshot(self) -> SnapshotData:
        """Return everything held, as of the last batch."""
        self.num_snapshots += 1
        ops = [IndexOp(kind="stored", hashes=tuple(self.held))]
        return SnapshotData(boot_ns=self.boot_ns, seq=self.next_seq - 1, ops=ops)

    async def close(self) -> None:
        """Close the sockets."""
        self._replaying.cancel()
        self._context.destroy(linger=0)

    async def _answer_replays(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.num_replay_requests += 1
            if not self.answers_replay:
                continue
            topic = (self.topic.encode(),) if self.replays_topic else ()
            for seq, payload in self._buffer:
                if seq >= int.from_bytes(start, "big"):
                    frame = (client, b"", *topic, seq.to_bytes(8, "big"), payload)
                    await self._replay.send_multipart(frame)
            await self._replay.send_multipart((client, b"", b"", END_SEQ, b""))
