"""The consumer's side of the event path: live frames, and replays of what was missed.

It checks the shape of frames, not their order: kvindex/ingest.py judges sequence numbers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvindex.foundation.errors import WireError
from kvindex.publisher import END_SEQ, SEQ_BYTES

logger = logging.getLogger("prefixfleet.kvindex.subscriber")

MAX_QUEUED_FRAMES = 10_000
"""Live frames kept while the consumer is busy; more are dropped and show as a gap."""


class EventFrame(msgspec.Struct, frozen=True):
    """One published batch, not decoded yet; the topic is "" where the sender left it out."""

    topic: str
    seq: int
    payload: bytes


class EventSource(Protocol):
    """Where an ingester's frames come from."""

    @property
    def can_replay(self) -> bool:
        """Whether `replay` can ever succeed."""
        ...

    async def receive(self, limit: int) -> list[EventFrame]:
        """Wait for a frame; return it with those that are there already, at most `limit`."""
        ...

    async def replay(self, from_seq: int) -> list[EventFrame]:
        """Return what is still there from a number on; raise WireError when that cannot be."""
        ...


class EventSubscriber:
    """Follow one publisher; ZMQ connects again by itself when the publisher comes back.

    `replay_endpoint` None means that the engine offers no replay. Belongs to one event loop.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic_prefix: str = "",
        replay_timeout_s: float = 2.0,
    ) -> None:
        self.num_malformed = 0
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic_prefix)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)

    @property
    def can_replay(self) -> bool:
        """Whether the engine offers replay."""
        return self._replay_endpoint is not None

    async def receive(self, limit: int) -> list[EventFrame]:
        """Wait for a well-formed frame; return it with those that are there already, in order.

        At most `limit`. Malformed frames are counted and logged; whoever sent them left a gap.
        """
        frames: list[EventFrame] = []
        while len(frames) < limit and (not frames or await self._socket.poll(0)):
            parts = await self._socket.recv_multipart()
            try:
                frames.append(_parse(parts))
            except WireError as error:
                self.num_malformed += 1
                logger.warning("event frame ignored: %s", error)
        return frames

    async def connection_lost(self) -> None:
        """Return when the connection breaks; it is opened again without being asked for."""
        await recv_monitor_message(self._monitor)

    async def replay(self, from_seq: int) -> list[EventFrame]:
        """Return the batches that the engine still has, from `from_seq` on, in order.

        The first may be later than asked for: then the rest is gone. Raises WireError when the
        engine offers no replay, does not finish within the time limit, or sends garbage.
        """
        if self._replay_endpoint is None:
            raise WireError("replay: the engine offers none")
        # A socket per request: a late answer to an earlier one can never be taken for ours.
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart((b"", from_seq.to_bytes(SEQ_BYTES, "big")))
            async with asyncio.timeout(self._replay_timeout_s):
                return await _read_replay(socket)
        except TimeoutError:
            raise WireError(
                f"replay: {self._replay_endpoint} gave no complete answer "
                f"within {self._replay_timeout_s} s"
            ) from None
        finally:
            socket.close()

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


async def _read_replay(socket: zmq.asyncio.Socket) -> list[EventFrame]:
    frames: list[EventFrame] = []
    while True:
        parts = await socket.recv_multipart()
        body = parts[1:] if parts and not parts[0] else parts
        if END_SEQ in body[:2]:
            return frames
        frames.append(_parse(body))


def _parse(parts: list[bytes]) -> EventFrame:
    """Read (topic, seq, payload), or (seq, payload) as older engines replay it."""
    if len(parts) not in (2, 3):
        raise WireError(f"expected topic, sequence number and payload, got {len(parts)} parts")
    seq, payload = parts[-2:]
    if len(seq) != SEQ_BYTES:
        raise WireError(f"the sequence number has {len(seq)} bytes, not {SEQ_BYTES}")
    topic = parts[0].decode(errors="replace") if len(parts) == 3 else ""
    return EventFrame(topic, int.from_bytes(seq, "big"), payload)
