"""The engine's side of the event path: a PUB socket, and a ROUTER that replays what was published.

Frames are vLLM's: topic, sequence number (8 bytes, big-endian, from 0), payload. It runs inside
the engine-core process, in a thread of its own, and knows nothing of blocks or of who listens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import zmq

from kvindex.events import EventBatch, encode_batch
from kvindex.foundation.errors import DependencyError

logger = logging.getLogger("prefixfleet.kvindex.publisher")

LOOPBACK = "tcp://127.0.0.1:*"
END_SEQ = b"\xff" * 8
"""Stands where the sequence number is, in the last answer to a replay request."""

SEQ_BYTES = 8
_QUEUE = "inproc://batches"
_REPLAY_FRAMES = 3
_POLL_MS = 100


class EventPublisher:
    """Number, send and remember event batches without ever blocking the engine.

    When more than `max_queued_batches` wait for the thread, a batch is dropped; its sequence
    number is used up, and an empty batch follows as soon as the queue is empty, so a consumer
    always sees the gap. `publish` belongs to one thread. The `*` in an endpoint becomes a free
    port; `endpoint` and `replay_endpoint` tell which. Raises DependencyError when an endpoint
    cannot be bound.
    """

    def __init__(
        self,
        topic: str,
        *,
        endpoint: str = LOOPBACK,
        replay_endpoint: str = LOOPBACK,
        max_replay_batches: int = 10_000,
        max_queued_batches: int = 100_000,
    ) -> None:
        self.num_dropped = 0
        self._topic = topic.encode()
        self._next_seq = 0
        self._lock = threading.Lock()
        self._is_gap_unannounced = False
        self._closing = threading.Event()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=max_replay_batches)
        self._context = zmq.Context()
        # The queue's bound is the sum of both ends' high-water marks, of which one is 1.
        self._queue_in = self._socket(zmq.PUSH, _QUEUE, send_limit=max_queued_batches)
        self._queue_out = self._context.socket(zmq.PULL)
        self._queue_out.setsockopt(zmq.RCVHWM, 1)
        self._queue_out.connect(_QUEUE)
        self._publish = self._socket(zmq.PUB, endpoint, send_limit=100_000)
        # A slow reader must not lose the tail of a replay: room for two whole ones.
        self._replay = self._socket(
            zmq.ROUTER, replay_endpoint, send_limit=2 * (max_replay_batches + 1)
        )
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def last_seq(self) -> int | None:
        """The last sequence number given out, None before the first."""
        return self._next_seq - 1 if self._next_seq else None

    def publish(self, batch: EventBatch) -> int:
        """Queue a batch and return its sequence number; never blocks.

        A batch that has no wire form (a hash beyond 64 bits as an integer) is dropped as well.
        """
        payload = _encode(batch)
        with self._lock:
            seq = self._next_seq
            self._next_seq += 1
            if payload is None or not self._enqueue(seq, payload):
                self.num_dropped += 1
                self._is_gap_unannounced = True
        return seq

    def close(self) -> None:
        """Send what is queued, end the thread and close the sockets; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._queue_in.close(linger=0)
        self._context.term()

    def _socket(self, kind: int, endpoint: str, *, send_limit: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, send_limit)
        socket.setsockopt(zmq.LINGER, 1000)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise DependencyError(
                f"KV events: cannot bind {endpoint}: {error}; choose another endpoint"
            ) from None
        return socket

    def _enqueue(self, seq: int, payload: bytes) -> bool:
        try:
            self._queue_in.send_multipart((_pack_seq(seq), payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue_out, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(_POLL_MS))
                if self._replay in ready:
                    self._answer_replay()
                if self._queue_out in ready:
                    seq, payload = self._queue_out.recv_multipart()
                    self._send(int.from_bytes(seq, "big"), payload)
                elif self._is_gap_unannounced:
                    self._announce_gap()
                elif self._closing.is_set():
                    return
        finally:
            for socket in (self._queue_out, self._publish, self._replay):
                socket.close()

    def _send(self, seq: int, payload: bytes) -> None:
        self._buffer.append((seq, payload))
        self._publish.send_multipart((self._topic, _pack_seq(seq), payload))

    def _announce_gap(self) -> None:
        """Publish an empty batch behind dropped ones, unless the engine queued one meanwhile."""
        with self._lock:
            if self._queue_out.poll(0):
                return
            self._is_gap_unannounced = False
            seq = self._next_seq
            self._next_seq += 1
            self._send(seq, encode_batch(EventBatch(time.time(), [])))
        logger.warning("event batches dropped total=%d", self.num_dropped)

    def _answer_replay(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != _REPLAY_FRAMES or len(frames[2]) != SEQ_BYTES:
            logger.warning("replay request ignored: expected identity, empty, 8-byte sequence")
            return
        client, _, start = frames
        first = int.from_bytes(start, "big")
        for seq, payload in self._buffer:
            if seq >= first:
                self._replay.send_multipart((client, b"", self._topic, _pack_seq(seq), payload))
        self._replay.send_multipart((client, b"", b"", END_SEQ, b""))


def _encode(batch: EventBatch) -> bytes | None:
    try:
        return encode_batch(batch)
    except (OverflowError, TypeError, ValueError) as error:
        logger.error("event batch dropped, it has no wire form: %s", error)
        return None


def _pack_seq(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")
