"""An index under test, with its clock, and short builders of what goes into it."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from kvindex.foundation.clock import VirtualClock
from kvindex.index import (
    IndexOp,
    PrefixIndex,
    Reservation,
    SequencedOps,
    Target,
    TargetMatch,
    Tier,
)
from kvindex.memory_index import AsyncMemoryIndex, MemoryIndex
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex

BOOT_NS = 1_760_000_000_000_000_123
A, B = Target("a"), Target("b")


def chain(length: int, name: str = "x") -> list[bytes]:
    """Return `length` digests; chains of different names have no block in common."""
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(length)]


def stored(hashes: Sequence[bytes], *, tier: Tier = "gpu", group: int = 0) -> IndexOp:
    """Return the operation that adds `hashes`."""
    return IndexOp(kind="stored", hashes=tuple(hashes), tier=tier, group=group)


def removed(hashes: Sequence[bytes], *, tier: Tier = "gpu") -> IndexOp:
    """Return the operation that takes `hashes` away."""
    return IndexOp(kind="removed", hashes=tuple(hashes), tier=tier)


CLEARED = IndexOp(kind="cleared")


class Subject:
    """An index and a way to let its clock run."""

    def __init__(self, index: PrefixIndex, elapse: Callable[[float], Awaitable[None]]) -> None:
        self.index = index
        self.elapse = elapse

    async def filled(self, target: Target, hashes: Sequence[bytes]) -> int:
        """Register a target that holds `hashes`, as of sequence 0; return its epoch."""
        epoch = await self.index.register(target, boot_ns=BOOT_NS, lease_s=60)
        await self.index.apply(target, epoch, [SequencedOps(0, (stored(hashes),))])
        return epoch

    async def reserve(
        self,
        request_id: str,
        *,
        attempt: int = 0,
        target: Target = A,
        gateway: str = "g",
        prefill_tokens: int = 100,
        num_blocks: int = 7,
        pending: Sequence[bytes] = (),
        pending_ttl_s: float = 30.0,
    ) -> None:
        """Reserve work on a target."""
        await self.index.reserve(
            Reservation(
                request_id=request_id,
                attempt=attempt,
                target=target,
                gateway=gateway,
                prefill_tokens=prefill_tokens,
                num_blocks=num_blocks,
                pending=tuple(pending),
                pending_ttl_s=pending_ttl_s,
            )
        )

    async def load(self) -> tuple[int, int, int]:
        """Return reserved tokens, blocks and requests of the only live target."""
        match = await self.match_one([])
        return match.reserved_prefill_tokens, match.reserved_blocks, match.num_reserved

    async def match_one(self, hashes: Sequence[bytes]) -> TargetMatch:
        """Match against the only live target."""
        (match,) = await self.index.match(hashes)
        return match

    async def matched(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the matched blocks by replica."""
        return {m.target.replica: m.matched_blocks for m in await self.index.match(hashes)}


def memory_subject() -> Subject:
    """Return an index in memory under a virtual clock."""
    clock = VirtualClock(1000.0)

    async def advance(seconds: float) -> None:
        clock.advance(seconds)

    return Subject(AsyncMemoryIndex(MemoryIndex(clock)), advance)


@asynccontextmanager
async def redis_subject(url: str) -> AsyncIterator[Subject]:
    """Yield an index in Redis under a pool name of its own and the server's clock."""
    redis = connect(url)

    async def server_time() -> float:
        seconds, micros = await redis.time()
        return float(seconds) + float(micros) / 1e6

    async def wait_for_server(seconds: float) -> None:
        end = await server_time() + seconds + 0.001
        while await server_time() < end:  # noqa: ASYNC110 (the clock is the server's)
            await asyncio.sleep(0.002)

    index = RedisIndex(redis, uuid.uuid4().hex[:16])
    try:
        yield Subject(index, wait_for_server)
    finally:
        await index.close()
