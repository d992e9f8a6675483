"""Many callers at once on one index: the load of several gateways, each a process with connections.

    python -m benchmarks.index_load URL REPLICAS BLOCKS SECONDS

is one such gateway; it prints what it measured as JSON. It fills nothing: see index_fleet.py.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

import msgspec
import uvloop

from benchmarks.index_fleet import POOL, random_holding
from kvindex.config import RedisConfig
from kvindex.redis_connect import connect
from kvindex.redis_index import RedisIndex

NUM_GATEWAYS = 2
NUM_CONNECTIONS = 2
CALLERS_PER_CONNECTION = 8


class Load(msgspec.Struct, frozen=True):
    """What one gateway got through: matches in so many seconds, and the median of one, in ms."""

    num_matches: int
    wall_s: float
    p50_ms: float


async def matches_per_s(
    url: str, *, num_replicas: int, num_blocks: int, seconds: float
) -> tuple[float, float]:
    """Run all gateways at once; return matches per second together and the worst median, in ms."""
    words = [url, str(num_replicas), str(num_blocks), str(seconds)]
    gateways = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.index_load", *words, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(NUM_GATEWAYS)
    ]
    answers = await asyncio.gather(*(gateway.communicate() for gateway in gateways))
    loads = [msgspec.json.decode(out, type=Load) for out, _ in answers]
    return sum(load.num_matches / load.wall_s for load in loads), max(load.p50_ms for load in loads)


async def _gateway(url: str, num_replicas: int, num_blocks: int, seconds: float) -> Load:
    chain = random_holding(num_replicas, num_blocks).chain
    config = RedisConfig(call_timeout_s=60.0)
    indexes = [RedisIndex(connect(url, config), POOL) for _ in range(NUM_CONNECTIONS)]
    samples: list[float] = []
    for index in indexes:
        await index.match(chain)  # connects, loads the script, leaves hints
    started = time.perf_counter()

    async def caller(index: RedisIndex) -> None:
        while (asked := time.perf_counter()) < started + seconds:
            await index.match(chain)
            samples.append((time.perf_counter() - asked) * 1e3)

    await asyncio.gather(*(caller(i) for i in indexes for _ in range(CALLERS_PER_CONNECTION)))
    wall_s = time.perf_counter() - started
    for index in indexes:
        await index.close()
    return Load(len(samples), wall_s, statistics.median(samples))


def main() -> None:
    """Be one gateway."""
    url, num_replicas, num_blocks, seconds = sys.argv[1:]
    load = uvloop.run(_gateway(url, int(num_replicas), int(num_blocks), float(seconds)))
    print(msgspec.json.encode(load).decode())


if __name__ == "__main__":
    main()
