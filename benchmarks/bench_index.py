"""The index in a real Redis on loopback: match, apply, snapshot, bytes per block.

    python -m benchmarks.bench_index [--quick] [--json]

Beside it, in the same run: one hash key per block (the layout of llm-d's indexer), read by a script
too, and the index in memory. On uvloop, as gateways are. Needs `redis-server` in the PATH. What is
compared is called in turn, round after round; a p50 is the smallest median of a round, the one that
neighbours disturbed least, and a p99 is that of all calls.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import uvloop
from redis.asyncio import Redis

from benchmarks.index_fleet import (
    LEASE_S,
    POOL,
    Holding,
    PerBlockKeys,
    digests,
    fill,
    fill_memory,
    put_in_flight,
    random_holding,
    shared_holding,
)
from benchmarks.index_load import (
    CALLERS_PER_CONNECTION,
    NUM_CONNECTIONS,
    NUM_GATEWAYS,
    matches_per_s,
)
from benchmarks.timing import Report, Row, arguments, at_least, at_most, machine, median_us, show
from kvindex.config import RedisConfig
from kvindex.index import IndexOp, OpKind, SequencedOps, Target
from kvindex.match_hints import MatchHints
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex
from tests.redis_server import running_server


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure; `fleets` are numbers of replicas and of entries in all."""

    fleets: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...] = (64, 1000, 8000)
    num_rounds: int = 5
    repeat: int = 40
    num_blocks: int = 100_000
    num_peer_matches: int = 4
    load_s: float = 5.0


QUICK = Plan(fleets=((8, 200_000), (64, 200_000)), lengths=(64, 1000), repeat=20, load_s=1.5)
FULL = Plan(fleets=((8, 1_000_000), (64, 1_000_000), (256, 1_000_000), (64, 10_000_000)))
PATIENT = RedisConfig(call_timeout_s=60.0)
Call = Callable[[], Awaitable[object]]
LARGE = 10_000_000
WARM_UP = 3
SETTLE_S = 5.0
GOALS_MS = {(64, 1000): 0.8, (8, 128): 0.25}
GOALS_PER_S = {(8, 128): 4000.0, (64, 1000): 1000.0}


class Timed(NamedTuple):
    """How long one call took, in ms: the smallest median of a round, and the p99 of all rounds."""

    p50: float
    p99: float


async def timed(num_rounds: int, *calls: tuple[Call, int]) -> list[Timed]:
    """Time calls in turn, each so many times a round after a few that warm up."""
    rounds: list[list[list[float]]] = [[] for _ in calls]
    for _ in range(num_rounds):
        for (call, repeat), samples in zip(calls, rounds, strict=True):
            samples.append(await samples_ms(call, repeat))
    return [
        Timed(min(map(statistics.median, samples)), p99([ms for each in samples for ms in each]))
        for samples in rounds
    ]


async def samples_ms(call: Call, repeat: int) -> list[float]:
    """Return the times of `repeat` calls, after a few that warm up."""
    for _ in range(WARM_UP):
        await call()
    samples = []
    for _ in range(repeat):
        started = time.perf_counter()
        await call()
        samples.append((time.perf_counter() - started) * 1e3)
    return samples


def p99(samples: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(samples)[min(len(samples) - 1, round(0.99 * len(samples)))]


async def used_memory(redis: Redis) -> int:
    """Return the bytes that the server has allocated."""
    return int((await redis.info("memory"))["used_memory"])


async def server_cpu_s(redis: Redis) -> float:
    """Return the processor seconds that the server has used so far."""
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def match_rows(plan: Plan, num_replicas: int, num_entries: int) -> list[Row]:
    """Measure matches of every chain length in one fleet of one size."""
    spread = [random_holding(num_replicas, length) for length in plan.lengths]
    shared = shared_holding(num_replicas, 1000)
    with running_server() as server:
        redis = connect(server.url, PATIENT)
        index = RedisIndex(redis, POOL)
        before = await used_memory(redis)
        await fill(index, [*spread, shared], num_entries=num_entries)
        total = sum(sum(state.num_blocks.values()) for state in await index.states())
        cost = (await used_memory(redis) - before) / total
        where = f"{num_replicas} replicas, {total / 1e6:.1f} M entries"
        goal = 12.0 if num_entries >= LARGE else None
        rows = [at_most(f"bytes per block, {where}", cost, "B", goal)]
        for holding in spread:
            rows += await compare(plan, index, redis, holding, where)
        rows += await compare(plan, index, redis, shared, f"shared, {where}")
        if num_entries >= LARGE:
            rows.append(await growth_row(plan, index, num_replicas))
        await put_in_flight(index, num_replicas)
        (busy,) = await timed(plan.num_rounds, (lambda: index.match(shared.chain), plan.repeat))
        name = f"match {len(shared.chain):,} blocks, shared, {where}, all replicas at work, p50"
        rows.append(Row(name=name, ours=busy.p50, unit="ms"))
        await index.close()
    return rows


async def growth_row(plan: Plan, large: RedisIndex, num_replicas: int) -> Row:
    """Compare a match in a large index with the same match in one of a million entries."""
    holding = random_holding(num_replicas, 1000)
    with running_server() as server:
        small = RedisIndex(connect(server.url, PATIENT), POOL)
        await fill(small, [holding], num_entries=1_000_000)
        of_small, of_large = await timed(
            2 * plan.num_rounds,
            (lambda: small.match(holding.chain), plan.repeat),
            (lambda: large.match(holding.chain), plan.repeat),
        )
        await small.close()
    name = f"match 1,000 blocks, {num_replicas} replicas, 10 M entries for 1 M, p50"
    return at_most(name, of_large.p50 / of_small.p50, "x", 1.5)


async def compare(
    plan: Plan, index: RedisIndex, redis: Redis, holding: Holding, where: str
) -> list[Row]:
    """Time our match, the peer's and that of the memory index, on the same holdings."""
    chain, expected = holding.chain, {f"replica-{i}": n for i, n in enumerate(holding.lengths)}
    peer, memory = PerBlockKeys(redis), fill_memory(holding)
    await peer.fill(holding)
    assert {m.target.replica: m.matched_blocks for m in await index.match(chain)} == expected
    found = {name.decode(): length for name, length in (await peer.match(chain)).items()}
    assert found == {name: length for name, length in expected.items() if length}
    unhinted = RedisIndex(redis, POOL, hints=MatchHints(max_chains=0))
    ours, cold, theirs = await timed(
        plan.num_rounds,
        (lambda: index.match(chain), plan.repeat),
        (lambda: unhinted.match(chain), plan.repeat),
        (lambda: peer.match(chain), plan.num_peer_matches),
    )
    cpu, repeat = await server_cpu_s(redis), plan.num_rounds * plan.repeat
    await samples_ms(lambda: index.match(chain), repeat)
    cpu_ms = (await server_cpu_s(redis) - cpu) / (repeat + WARM_UP) * 1e3
    in_memory = median_us(lambda: memory.match(chain), repeat=20) / 1e3
    await peer.forget(chain)
    name = f"match {len(chain):,} blocks, {where}"
    first = at_most(f"{name}, p50", ours.p50, "ms", GOALS_MS.get((len(expected), len(chain))))
    first.peer, first.ratio = theirs.p50, theirs.p50 / ours.p50
    return [
        first,
        Row(
            name=f"{name}, seen for the first time, p50",
            ours=cold.p50,
            peer=theirs.p50,
            ratio=theirs.p50 / cold.p50,
            unit="ms",
        ),
        Row(name=f"{name}, p99", ours=ours.p99, peer=theirs.p99, unit="ms"),
        Row(name=f"{name}, of which server", ours=cpu_ms, unit="ms"),
        Row(name=f"{name}, in memory", ours=in_memory, unit="ms"),
    ]


async def small_fleet_rows(plan: Plan) -> list[Row]:
    """Measure what a small installation sees: 8 replicas, 128 blocks."""
    holding = random_holding(8, 128)
    with running_server() as server:
        redis = connect(server.url, PATIENT)
        index = RedisIndex(redis, POOL)
        await fill(index, [holding], num_entries=20_000)
        unhinted = RedisIndex(redis, POOL, hints=MatchHints(max_chains=0))
        ours, cold, pings = await timed(
            plan.num_rounds,
            (lambda: index.match(holding.chain), plan.repeat),
            (lambda: unhinted.match(holding.chain), plan.repeat),
            (redis.ping, plan.repeat),
        )
        await index.close()
    name = "match 128 blocks, 8 replicas"
    return [
        at_most(f"{name}, p50", ours.p50, "ms", GOALS_MS[8, 128]),
        Row(name=f"{name}, seen for the first time, p50", ours=cold.p50, unit="ms"),
        Row(name=f"{name}, p99", ours=ours.p99, unit="ms"),
        Row(name="PING through the same client, p50", ours=pings.p50, unit="ms"),
    ]


async def load_rows(plan: Plan) -> list[Row]:
    """Measure how many matches one Redis answers, for several gateways that ask all the time."""
    rows = []
    for (num_replicas, num_blocks), goal in GOALS_PER_S.items():
        with running_server() as server:
            redis = connect(server.url, PATIENT)
            holding = random_holding(num_replicas, num_blocks)
            await fill(RedisIndex(redis, POOL), [holding], num_entries=200_000)
            cpu_s = await server_cpu_s(redis)
            per_s, p50 = await matches_per_s(
                server.url, num_replicas=num_replicas, num_blocks=num_blocks, seconds=plan.load_s
            )
            cpu_s = await server_cpu_s(redis) - cpu_s
            await redis.aclose()
        name = f"matches of {num_blocks:,} blocks, {num_replicas} replicas, under load"
        rows += [
            at_least(name, per_s, "/s", goal),
            Row(name=f"{name}, p50", ours=p50, unit="ms"),
            Row(name=f"{name}, of which server", ours=cpu_s / per_s / plan.load_s * 1e3, unit="ms"),
        ]
    return rows


async def change_rows(plan: Plan) -> list[Row]:
    """Measure a snapshot, a steady stream of events, and what is left after removing it all."""
    target, hashes = Target("replica-0"), digests(plan.num_blocks, seed=5)
    with running_server() as server:
        redis = connect(server.url, PATIENT)
        index = RedisIndex(redis, POOL)
        epoch = await index.register(target, boot_ns=1, lease_s=LEASE_S)
        op = IndexOp(kind="stored", hashes=tuple(hashes))
        started = time.perf_counter()
        await index.load_snapshot(target, epoch, seq=-1, ops=[op])
        wall_s = time.perf_counter() - started
        rows = [at_most(f"snapshot of {plan.num_blocks:,} blocks", wall_s, "s", 2.0)]
        events, calls = steady_stream(hashes)
        cpu_s, started = await server_cpu_s(redis), time.perf_counter()
        for batches in calls:
            assert (await index.apply(target, epoch, batches)).status == "applied"
        wall_s = time.perf_counter() - started
        cpu_s = await server_cpu_s(redis) - cpu_s
        rows.append(at_least("apply, block events", events / wall_s, "/s", 100_000))
        rows.append(Row(name="apply, per second of server time", ours=events / cpu_s, unit="/s"))
        rows.append(await memory_row(plan, index, redis))
        await index.close()
    return rows


async def memory_row(plan: Plan, index: RedisIndex, redis: Redis) -> Row:
    """Measure what stays of as many blocks as were stored and removed."""
    target, hashes = Target("replica-1"), digests(plan.num_blocks, seed=6)
    epoch = await index.register(target, boot_ns=1, lease_s=LEASE_S)
    before, seq = await used_memory(redis), 0
    kinds: tuple[OpKind, ...] = ("stored", "removed")
    for kind in kinds:
        for first in range(0, plan.num_blocks, 1000):
            op = IndexOp(kind=kind, hashes=tuple(hashes[first : first + 1000]))
            await index.apply(target, epoch, [SequencedOps(seq, (op,))])
            seq += 1
        if kind == "stored":
            full = await used_memory(redis) - before
    # The server gives its connections' buffers back when they have been idle for a while.
    deadline, rest = time.monotonic() + SETTLE_S, full
    while rest > full / 50 and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        rest = await used_memory(redis) - before
    name = f"memory left of {plan.num_blocks:,} blocks stored and removed"
    return at_most(name, 100 * rest / full, "%", 10.0)


def steady_stream(hashes: list[bytes]) -> tuple[int, list[list[SequencedOps]]]:
    """Replace every block once: per batch 16 go and 16 come, in calls of 64 batches."""
    new = digests(len(hashes), seed=9)
    batches = [
        SequencedOps(
            seq,
            (
                IndexOp(kind="removed", hashes=tuple(hashes[first : first + 16])),
                IndexOp(kind="stored", hashes=tuple(new[first : first + 16])),
            ),
        )
        for seq, first in enumerate(range(0, len(hashes), 16))
    ]
    calls = [batches[first : first + 64] for first in range(0, len(batches), 64)]
    return 2 * len(hashes), calls


async def measure(plan: Plan) -> list[Row]:
    """Measure everything, one server after the other."""
    rows = await change_rows(plan)
    rows += await small_fleet_rows(plan)
    rows += await load_rows(plan)
    for num_replicas, num_entries in plan.fleets:
        rows += await match_rows(plan, num_replicas, num_entries)
    return rows


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    plan = QUICK if options.quick else FULL
    report = Report(
        claim="One Redis tells who holds how much of a prefix, for a fleet, in one round trip",
        machine=machine(),
        settings={
            "rounds": plan.num_rounds,
            "repeat": plan.repeat,
            "holdings": "each replica holds a random part of the chain",
            "peer": "one hash key per block, all read in one script",
            "load": f"{NUM_GATEWAYS} processes, {NUM_CONNECTIONS} connections each, "
            f"{CALLERS_PER_CONNECTION} callers per connection",
        },
        rows=uvloop.run(measure(plan)),
    )
    show(report, as_json=options.json)


if __name__ == "__main__":
    main()
