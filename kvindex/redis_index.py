"""The index of one pool in Redis, shared by any number of gateways and replicas.

Each operation is one script (kvindex/lua; keyspace.lua lists every key) and one round trip. Of a
hash only the last 8 bytes are stored: a wrong hit needs a collision of 64 bits, and the engine
compares full digests anyway, so it costs a misjudged prediction, never a wrong answer. It knows
no policy, and it never sees a token.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec
from redis.asyncio import Redis

from kvindex.hit_rule import CacheLayout
from kvindex.index import (
    Announcement,
    ApplyResult,
    IndexOp,
    LoadReport,
    PrefillEnd,
    Release,
    Reservation,
    SequencedOps,
    Target,
    TargetMatch,
    TargetState,
    Tier,
)
from kvindex.match_hints import MatchHints
from kvindex.redis_connect import dependency_errors
from kvindex.redis_layout import pack_layout
from kvindex.redis_roster import Found, Hints, Roster, decode_report, no_roster, parse_target
from kvindex.redis_script import RedisScript

LAYOUT_VERSION = 3
"""Part of every key: releases that lay out their keys differently do not see each other's."""

HASH_BYTES = 8
DIGEST_BYTES = 32
SNAPSHOT_CHUNK_HASHES = 2500
"""Hashes per script of a snapshot: the server is busy for a few milliseconds with each."""

SHADOW_TTL_S = 60.0

_INVENTORIES = ("keyspace", "inventory", "slots")
_TARGETS = (*_INVENTORIES, "reservations", "targets")
_REGISTER = RedisScript("register", after=_TARGETS)
_RENEW = RedisScript("renew", after=_TARGETS)
_DEREGISTER = RedisScript("deregister", after=_TARGETS)
_APPLY = RedisScript("apply", after=_INVENTORIES)
_SNAPSHOT_BEGIN = RedisScript("snapshot_begin", after=_INVENTORIES)
_SNAPSHOT_CHUNK = RedisScript("snapshot_chunk", after=_INVENTORIES)
_SNAPSHOT_COMMIT = RedisScript("snapshot_commit", after=_INVENTORIES)
_MATCH = RedisScript("match", after=("keyspace", "inventory", "search", "loads"))
_TOUCH_GATEWAY = RedisScript("touch_gateway", after=("keyspace", "reservations"))
_ANNOUNCE = RedisScript("announce", after=("keyspace", "reservations"))
_HELD = RedisScript("held", after=("keyspace", "inventory"))
_STATES = RedisScript("states", after=("keyspace", "inventory"))

_encoder = msgspec.msgpack.Encoder()


class HeldBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the blocks asked for a target does not hold, as of event batch `applied_seq`."""

    epoch: int
    applied_seq: int | None
    missing: tuple[bytes, ...]


class RedisIndex:
    """`PrefixIndex` over a Redis >= 6.2 or Valkey server; see kvindex/index.py for the contract.

    `match` looks at gpu and host together. The client is closed with the index. `shadow_ttl_s`: how
    long a snapshot whose loading was broken off stays. `hints`: where matches look first, by
    default where those of this client ended.
    """

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        shadow_ttl_s: float = SHADOW_TTL_S,
        hints: MatchHints[Hints] | None = None,
    ) -> None:
        if "{" in pool or "}" in pool:
            raise ValueError(f"pool {pool!r} must not contain braces")
        self._redis = redis
        self._shadow_ttl_s = shadow_ttl_s
        self._prefix = f"pf:{{{pool}}}:{LAYOUT_VERSION}:"
        self._hints: MatchHints[Hints] = MatchHints() if hints is None else hints
        self._roster = no_roster()

    async def register(
        self, target: Target, *, boot_ns: int, lease_s: float, layout: CacheLayout | None = None
    ) -> int:
        """Open a new epoch, max(stored + 1, boot_ns), with an empty inventory; return it."""
        report, lease_ms = _encoder.encode(LoadReport()), _milliseconds(lease_s)
        packed = b"" if layout is None else pack_layout(layout)
        return int(await self._run(_REGISTER, str(target), boot_ns, lease_ms, report, packed))

    async def renew(
        self, target: Target, epoch: int, *, lease_s: float, report: LoadReport
    ) -> bool:
        """Extend the lease; False when it has lapsed or the epoch is old: register again."""
        packed = _encoder.encode(report)
        return bool(await self._run(_RENEW, str(target), epoch, _milliseconds(lease_s), packed))

    async def deregister(self, target: Target, epoch: int) -> None:
        """Drop a target at once; an old epoch changes nothing."""
        await self._run(_DEREGISTER, str(target), epoch)

    async def apply(
        self, target: Target, epoch: int, batches: Sequence[SequencedOps]
    ) -> ApplyResult:
        """Apply batches in order, atomically, each at most once."""
        args: list[bytes | str | int] = []
        for batch in batches:
            args += (batch.seq, len(batch.ops))
            for op in batch.ops:
                args += (op.kind, _part(op), _pack(op.hashes))
        status, next_seq = await self._run(_APPLY, str(target), epoch, *args)
        return ApplyResult(status=status.decode(), applied_seq=_before(next_seq))

    async def load_snapshot(
        self, target: Target, epoch: int, *, seq: int, ops: Sequence[IndexOp]
    ) -> bool:
        """Replace the inventory by `ops`, in chunks into a shadow that is swapped in at the end."""
        hashes_by_part: dict[str, list[bytes]] = defaultdict(list)
        for op in ops:
            hashes_by_part[_part(op)].extend(op.hashes)
        name, ttl_ms = str(target), _milliseconds(self._shadow_ttl_s)
        shadow = await self._run(_SNAPSHOT_BEGIN, name, epoch, secrets.token_hex(8), ttl_ms)
        if shadow is None:
            return False
        for part, chunk in _chunks(hashes_by_part):
            packed = _pack(chunk)
            if not await self._run(_SNAPSHOT_CHUNK, name, epoch, shadow, ttl_ms, part, packed):
                return False
        return bool(await self._run(_SNAPSHOT_COMMIT, name, epoch, shadow, seq + 1))

    async def match(self, hashes: Sequence[bytes]) -> list[TargetMatch]:
        """Return every live target with what it holds of the chain, in one round trip.

        The server looks twice at each target that holds what an earlier match on this chain has
        found; of the rest, log2(chain) times for each different answer. Of the targets it tells
        what has changed since the last match of this client.
        """
        roster = self._roster
        told = roster.known(self._hints.of_chain(hashes))
        answer = await self._run(_MATCH, _pack(hashes), *told)
        changed, last_report, reports, *rest = answer
        if changed:
            stamp, *columns = changed
            roster = self._roster = Roster(stamp, columns, last_report=last_report)
        roster.update(last_report, reports)
        found = Found(*rest)
        self._hints.remember(hashes, roster.hints(found))
        return roster.matches(found, num_hashes=len(hashes))

    async def touch_gateway(self, gateway: str, *, lease_s: float) -> None:
        """Keep a gateway's reservations counted for another `lease_s`."""
        await self._run(_TOUCH_GATEWAY, gateway, _milliseconds(lease_s))

    async def reserve(self, reservation: Reservation) -> None:
        """Count the work at once; the same (request, attempt) counts once.

        Nothing is counted for a target or a gateway without a live lease.
        """
        await self.announce((reservation,))

    async def release_prefill(self, target: Target, request_id: str, attempt: int) -> None:
        """Stop counting the prefill tokens: the first token has come. Idempotent."""
        await self.announce((PrefillEnd(target, request_id, attempt),))

    async def release(
        self, target: Target, request_id: str, attempt: int, *, written: bool
    ) -> None:
        """Stop counting the request; unless its blocks were `written`, withdraw its pending ones.

        Written blocks stay pending until their time is over: their events may be on the way.
        """
        await self.announce((Release(target, request_id, attempt, written),))

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Do any number of these in order, in one round trip, as the methods above do each."""
        args: list[bytes | str | int] = []
        for one in announcements:
            args += _words(one)
        await self._run(_ANNOUNCE, *args)

    async def states(self) -> list[TargetState]:
        """List the live targets; `num_blocks` is by tier, over all groups."""
        rows: list[list[Any]] = await self._run(_STATES)
        states = [
            TargetState(
                target=parse_target(target),
                epoch=int(epoch),
                applied_seq=_before(next_seq),
                num_blocks={"gpu": gpu, "host": host},
                lease_left_s=lease_left_ms / 1000,
                report=decode_report(report),
            )
            for target, epoch, next_seq, gpu, host, lease_left_ms, report in rows
        ]
        return sorted(states, key=lambda state: state.target)

    async def held(self, target: Target, part: IndexOp) -> HeldBlocks | None:
        """Tell which of the hashes of `part` a target lacks there; None when it is not live.

        For inspection: `part` says group and tier, as an operation of a snapshot does.
        """
        missing: list[bytes] = []
        for first in range(0, max(len(part.hashes), 1), SNAPSHOT_CHUNK_HASHES):
            chunk = part.hashes[first : first + SNAPSHOT_CHUNK_HASHES]
            found = await self._run(_HELD, str(target), _part(part), _pack(chunk))
            if found is None:
                return None
            epoch, next_seq, flags = found
            missing += [h for h, flag in zip(chunk, flags, strict=True) if flag == ord("0")]
        return HeldBlocks(epoch=int(epoch), applied_seq=_before(next_seq), missing=tuple(missing))

    async def close(self) -> None:
        """Release connections."""
        with dependency_errors(self._redis):
            await self._redis.aclose()

    async def _run(self, script: RedisScript, *args: bytes | str | int) -> Any:
        return await script.run(self._redis, self._prefix, *args)


def _pack(hashes: Sequence[bytes]) -> bytes:
    """Concatenate the last 8 bytes of each hash, shorter ones padded in front."""
    joined = b"".join(hashes)
    if len(joined) == DIGEST_BYTES * len(hashes):
        # No hash is longer than a digest, so these are digests. Every fourth 64-bit word of them in
        # a row: 5 times as fast as slicing each.
        return memoryview(joined).cast("Q")[3::4].tobytes()
    return b"".join([block_hash[-HASH_BYTES:].rjust(HASH_BYTES, b"\0") for block_hash in hashes])


def _chunks(hashes_by_part: dict[str, list[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    for part, hashes in hashes_by_part.items():
        for first in range(0, len(hashes), SNAPSHOT_CHUNK_HASHES):
            yield part, hashes[first : first + SNAPSHOT_CHUNK_HASHES]


def _part(op: IndexOp) -> str:
    if op.tier not in get_args(Tier):
        raise ValueError(f"tier {op.tier!r}: expected one of {get_args(Tier)}")
    return f"{op.group}:{op.tier}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _words(announcement: Announcement) -> tuple[bytes | str | int, ...]:
    """Return what lua/announce.lua reads of one announcement."""
    target = str(announcement.target)
    id = f"{announcement.request_id}#{announcement.attempt}"
    if isinstance(announcement, PrefillEnd):
        return "prefill_end", target, id
    if isinstance(announcement, Release):
        return "release", target, id, "written" if announcement.written else "withdrawn"
    return (
        "reserve",
        target,
        id,
        announcement.gateway,
        announcement.prefill_tokens,
        announcement.num_blocks,
        _milliseconds(announcement.pending_ttl_s),
        _pack(announcement.pending),
    )


def _before(next_seq: int) -> int | None:
    return next_seq - 1 if next_seq else None
