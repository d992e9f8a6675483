"""`prefixfleet index verify`: compare the index with what every replica's pool really holds.

Both sides are compared as of the same event batch, else the comparison is made again; it changes
nothing. Foreign engines are left out: they hand out no snapshot.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Literal

import msgspec

from kvindex.foundation.arguments import Invocation
from kvindex.foundation.errors import DependencyError
from kvindex.index import IndexOp, Target, TargetState, Tier
from kvindex.redis_index import RedisIndex
from kvindex.registry import ReplicaRecord
from router.launch.http_call import call
from router.launch.index_location import IndexLocation, index_parser, locate, opened_pools
from router.launch.inspect import refusal
from router.launch.table import table

Verdict = Literal["equal", "different", "busy", "not registered", "unreachable"]

_NUM_ATTEMPTS = 10
_PAUSE_S = 0.2
_TIMEOUT_S = 60.0
_NUM_SHOWN = 20


class PoolBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of a replica's snapshot."""

    block_hash: bytes
    group: int
    tier: Tier


class PoolContent(msgspec.Struct, frozen=True):
    """A replica's snapshot, as of event batch `seq` (-1: none yet)."""

    seq: int
    entries: list[PoolBlock]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one replica, or of one of its ranks (`replica/rank`).

    `missing` are blocks of its pool that the index lacks, in hex.
    `num_surplus` counts blocks that only the index has; it keeps too little of a hash to name
    them.
    """

    replica: str
    verdict: Verdict
    num_pool_blocks: int = 0
    num_index_blocks: int = 0
    missing: list[str] = []
    num_surplus: int = 0
    reason: str = ""


def verify(invocation: Invocation) -> int:
    """Compare all replicas; 1 unless every one is equal."""
    parser = index_parser(invocation, "Compare the index with every replica's real pool.")
    location = locate(invocation, parser, parser.read())
    found = asyncio.run(_compare_all(location))
    if invocation.as_json:
        print(json.dumps({"replicas": msgspec.to_builtins(found)}))
    else:
        print(table([_row(comparison) for comparison in found]))
        for comparison in found:
            for block in comparison.missing[:_NUM_SHOWN]:
                print(f"{comparison.replica}: the index lacks {block}")
    return 0 if found and all(c.verdict == "equal" for c in found) else 1


async def _compare_all(location: IndexLocation) -> list[Comparison]:
    token = location.secrets.internal_token
    async with opened_pools(location) as pools:
        return [
            await _compare(record, rank, pool.index, token=token)
            for pool in pools
            for record in pool.replicas
            if record.kind == "prefixfleet"
            for rank in range(record.dp_size)
        ]


async def _compare(
    record: ReplicaRecord, rank: int, index: RedisIndex, *, token: str
) -> Comparison:
    """Compare one engine core, again and again until both sides are of the same moment."""
    target = Target(record.id, rank)
    name = record.id if record.dp_size == 1 else str(target)
    for _ in range(_NUM_ATTEMPTS):
        try:
            content = await asyncio.to_thread(_read_pool, record.url, rank, token)
        except DependencyError as error:
            return Comparison(replica=name, verdict="unreachable", reason=str(error))
        comparison = await _compare_once(target, content, index)
        if comparison.verdict != "busy":
            break
        await asyncio.sleep(_PAUSE_S)
    return msgspec.structs.replace(comparison, replica=name)


def _read_pool(url: str, rank: int, token: str) -> PoolContent:
    answer = call(f"{url}/kv/snapshot?format=json&rank={rank}", key=token, timeout_s=_TIMEOUT_S)
    if answer.status != 200:
        reason = refusal(answer) or f"it answered {answer.status}"
        raise DependencyError(f"no snapshot from {url}: {reason}")
    try:
        return msgspec.convert(answer.body, PoolContent)
    except msgspec.ValidationError as error:
        raise DependencyError(f"snapshot of {url}: {error}") from None


async def _compare_once(target: Target, content: PoolContent, index: RedisIndex) -> Comparison:
    """Compare with a snapshot; `busy` when the index is of another moment, before or after."""
    parts: dict[tuple[int, Tier], list[bytes]] = defaultdict(list)
    for block in content.entries:
        parts[block.group, block.tier].append(block.block_hash)
    seqs: set[int | None] = set()
    missing: list[str] = []
    for (group, tier), hashes in parts.items():
        part = IndexOp(kind="stored", hashes=tuple(hashes), group=group, tier=tier)
        held = await index.held(target, part)
        if held is not None:
            seqs.add(held.applied_seq)
            missing += [f"{block_hash.hex()} ({tier})" for block_hash in held.missing]
    state = next((state for state in await index.states() if state.target == target), None)
    if state is None:
        return Comparison(
            replica=target.replica, verdict="not registered", num_pool_blocks=len(content.entries)
        )
    seqs.add(state.applied_seq)
    is_same_moment = seqs == {content.seq if content.seq >= 0 else None}
    return _conclude(state, content, missing, is_same_moment=is_same_moment)


def _conclude(
    state: TargetState, content: PoolContent, missing: list[str], *, is_same_moment: bool
) -> Comparison:
    num_pool, num_index = len(content.entries), sum(state.num_blocks.values())
    num_surplus = num_index - (num_pool - len(missing))
    verdict: Verdict = "different" if missing or num_surplus else "equal"
    return Comparison(
        replica=state.target.replica,
        verdict=verdict if is_same_moment else "busy",
        num_pool_blocks=num_pool,
        num_index_blocks=num_index,
        missing=missing,
        num_surplus=num_surplus,
        reason=state.report.reason if is_same_moment else "pool and index never stood still",
    )


def _row(comparison: Comparison) -> dict[str, object]:
    return {
        "replica": comparison.replica,
        "verdict": comparison.verdict,
        "pool blocks": comparison.num_pool_blocks,
        "index blocks": comparison.num_index_blocks,
        "missing": len(comparison.missing),
        "surplus": comparison.num_surplus,
        "reason": comparison.reason or None,
    }
