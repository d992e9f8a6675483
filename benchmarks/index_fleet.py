"""Fleets for bench_index.py: a real server, inventories of random blocks, and the peer's layout.

It knows how to fill and to ask, and measures nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from kvindex.index import IndexOp, LoadReport, Reservation, SequencedOps, Target
from kvindex.memory_index import MemoryIndex
from kvindex.redis_index import RedisIndex

LEASE_S = 3600.0
POOL = "0123456789abcdef"
REPORT = LoadReport(mode="EXACT", num_running=3, prefill_tokens_per_s=1234.5)
_SNAPSHOT_BLOCKS = 100_000
_PEER_BATCH = 2000


def digests(count: int, *, seed: int) -> list[bytes]:
    """Return random 32-byte digests."""
    packed = random.Random(seed).randbytes(32 * count)
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


class Holding(msgspec.Struct, frozen=True):
    """A chain and how much of it each replica holds."""

    chain: list[bytes]
    lengths: list[int]


def random_holding(num_replicas: int, length: int) -> Holding:
    """Return a chain of which each replica holds any part, each length equally likely.

    The hardest case for our look-up, since every replica has another answer.
    """
    source = random.Random(length)
    lengths = [source.randint(0, length) for _ in range(num_replicas)]
    return Holding(digests(length, seed=length), lengths)


def shared_holding(num_replicas: int, length: int) -> Holding:
    """Return a conversation as a fleet holds it: its first eighth everywhere, all of it twice."""
    lengths = [length // 8] * (num_replicas - 2) + [length, length * 3 // 4]
    return Holding(digests(length, seed=length + 1), lengths)


async def fill(index: RedisIndex, holdings: Sequence[Holding], *, num_entries: int) -> None:
    """Register the replicas; together they hold about `num_entries` blocks."""
    num_replicas = len(holdings[0].lengths)
    rest = num_entries // num_replicas
    for i in range(num_replicas):
        target = Target(f"replica-{i}")
        epoch = await index.register(target, boot_ns=1_760_000_000_000_000_000 + i, lease_s=LEASE_S)
        await index.renew(target, epoch, lease_s=LEASE_S, report=REPORT)
        hashes = [h for holding in holdings for h in holding.chain[: holding.lengths[i]]]
        hashes += digests(max(0, rest - len(hashes)), seed=1_000_000 + i)
        for seq, first in enumerate(range(0, len(hashes), _SNAPSHOT_BLOCKS)):
            op = IndexOp(kind="stored", hashes=tuple(hashes[first : first + _SNAPSHOT_BLOCKS]))
            if seq == 0:
                await index.load_snapshot(target, epoch, seq=0, ops=[op])
            else:
                await index.apply(target, epoch, [SequencedOps(seq, (op,))])


async def put_in_flight(index: RedisIndex, num_replicas: int) -> None:
    """Reserve a request of each of two gateways at every replica, some blocks of it pending."""
    for gateway in ("gateway-0", "gateway-1"):
        await index.touch_gateway(gateway, lease_s=LEASE_S)
        for i in range(num_replicas):
            await index.reserve(
                Reservation(
                    request_id=f"{gateway}-{i}",
                    attempt=0,
                    target=Target(f"replica-{i}"),
                    gateway=gateway,
                    prefill_tokens=800,
                    num_blocks=60,
                    pending=tuple(digests(50, seed=2_000_000 + i)),
                    pending_ttl_s=LEASE_S,
                )
            )


def fill_memory(holding: Holding) -> MemoryIndex:
    """Return the index in memory with the same replicas, holding the chain only."""
    index = MemoryIndex()
    for i, length in enumerate(holding.lengths):
        epoch = index.register(Target(f"replica-{i}"), boot_ns=1, lease_s=LEASE_S)
        op = IndexOp(kind="stored", hashes=tuple(holding.chain[:length]))
        index.load_snapshot(Target(f"replica-{i}"), epoch, seq=0, ops=[op])
    return index


class PerBlockKeys:
    """The peer's layout: one hash key per block, a field for each replica that holds it.

    A look-up reads the key of each block in turn, intersects the holders and stops when none is
    left, as llm-d's KV-cache indexer does with Redis; here in a script, to spare it the client.
    """

    _MATCH = """
        local matched, holders = {}, nil
        for position = 1, #ARGV[1], 8 do
          local hash = string.sub(ARGV[1], position, position + 7)
          local left, is_empty = {}, true
          for _, replica in ipairs(redis.call('HKEYS', 'block:' .. hash)) do
            if not holders or holders[replica] then
              left[replica], is_empty = true, false
              matched[replica] = (position + 7) / 8
            end
          end
          if is_empty then break end
          holders = left
        end
        local answer = {}
        for replica, length in pairs(matched) do
          answer[#answer + 1] = replica
          answer[#answer + 1] = length
        end
        return answer
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._match = redis.register_script(self._MATCH)

    async def fill(self, holding: Holding) -> None:
        """Enter what each replica holds of the chain."""
        for i, length in enumerate(holding.lengths):
            await self.store(f"replica-{i}", holding.chain[:length])

    async def store(self, replica: str, hashes: Sequence[bytes]) -> None:
        """Enter blocks of one replica."""
        for first in range(0, len(hashes), _PEER_BATCH):
            pipeline = self._redis.pipeline(transaction=False)
            for block_hash in hashes[first : first + _PEER_BATCH]:
                pipeline.hset(b"block:" + block_hash[-8:], replica, "1")
            await pipeline.execute()

    async def match(self, hashes: Sequence[bytes]) -> dict[bytes, int]:
        """Return the number of leading blocks of each replica that holds the first."""
        packed = b"".join([block_hash[-8:] for block_hash in hashes])
        flat: list[Any] = await self._match(keys=["block:"], args=[packed])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove blocks of all replicas."""
        await self._redis.unlink(*[b"block:" + block_hash[-8:] for block_hash in hashes])
