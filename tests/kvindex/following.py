"""An ingester that runs in a test, and what it runs against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvindex.hashing import HashScheme, known_answer
from kvindex.index import LoadReport, PrefixIndex, Target
from kvindex.ingest import Ingester
from kvindex.ingest_source import IngestSource
from kvindex.memory_registry import MemoryRegistry
from kvindex.registry import ModelIdentity, ReplicaRecord
from kvindex.subscriber import EventSubscriber
from tests.conditions import until
from tests.contracts.index_subject import A, chain
from tests.kvindex.stream_engine import StreamEngine

X = chain(200)


@dataclass
class Follow:
    """An ingester that runs, and what it runs against."""

    engine: StreamEngine
    ingester: Ingester
    index: PrefixIndex
    registry: MemoryRegistry
    target: Target = A
    is_alive: bool = True
    load: LoadReport = field(default_factory=LoadReport)

    async def matched(self) -> int | None:
        """Return what the target is credited with of chain X, None when it is not live."""
        found = {match.target: match.matched_blocks for match in await self.index.match(X)}
        return found.get(self.target)

    async def exact_with(self, num_blocks: int) -> None:
        """Wait until the ingester is EXACT and credits the target with this many blocks."""

        async def reached() -> bool:
            return self.ingester.mode == "EXACT" and await self.matched() == num_blocks

        await until(reached)


def record(epoch: int) -> ReplicaRecord:
    return ReplicaRecord(
        id="a",
        kind="prefixfleet",
        url="http://127.0.0.1:1",
        epoch=epoch,
        served_models=("m",),
        identity=ModelIdentity(model="m"),
        hash_scheme=HashScheme(),
        known_answer=known_answer(HashScheme()),
    )


@asynccontextmanager
async def following(
    engine: StreamEngine,
    index: PrefixIndex,
    *,
    target: Target = A,
    renew_s: float = 0.1,
    lease_s: float = 10.0,
    has_replay: bool = True,
) -> AsyncIterator[Follow]:
    subscriber = EventSubscriber(
        engine.endpoint,
        replay_endpoint=engine.replay_endpoint if has_replay else None,
        replay_timeout_s=0.2,
    )
    registry = MemoryRegistry()
    follow: Follow
    source = IngestSource(
        snapshot=engine.snapshot,
        report=lambda: follow.load,
        is_alive=lambda: follow.is_alive,
        make_record=record,
    )
    ingester = Ingester(
        target,
        subscriber=subscriber,
        index=index,
        registry=registry,
        source=source,
        lease_s=lease_s,
        renew_s=renew_s,
    )
    follow = Follow(engine, ingester, index, registry, target)
    running = asyncio.create_task(ingester.run())
    try:
        await engine.subscribed()
        yield follow
    finally:
        running.cancel()
        await asyncio.wait({running})
        subscriber.close()
    assert running.cancelled()
