"""A foreign engine's stream followed into an index: gaps, restarts, lost connections, silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from kvindex.events import AllBlocksCleared, EventBatch, encode_batch
from kvindex.foreign_inventory import ForeignInventory
from kvindex.foreign_stream import ForeignStream
from kvindex.foundation.clock import SystemClock
from kvindex.hashing import HashScheme, hash_tokens
from kvindex.index import LoadReport
from kvindex.ingest import Ingester
from kvindex.ingest_source import IngestSource
from kvindex.memory_index import AsyncMemoryIndex
from kvindex.memory_registry import MemoryRegistry
from kvindex.subscriber import EventSubscriber
from tests.conditions import until
from tests.contracts.index_subject import A
from tests.kvindex.following import record
from tests.kvindex.foreign_engine import ForeignEngine, ForeignPrompt, tokens_of

PROMPT = ForeignPrompt(tokens_of(128))
HASHES = hash_tokens(PROMPT.tokens, HashScheme())
OTHER = ForeignPrompt(tokens_of(64, first=1000))
OTHER_HASHES = hash_tokens(OTHER.tokens, HashScheme())


@dataclass
class Bridged:
    """A foreign engine, its retold stream, and the ingester that follows it."""

    engine: ForeignEngine
    stream: ForeignStream
    ingester: Ingester
    index: AsyncMemoryIndex

    async def credits(self, hashes: list[bytes]) -> int | None:
        """Return how much of a chain the engine is credited with."""
        found = {match.target: match.matched_blocks for match in await self.index.match(hashes)}
        return found.get(A)

    async def settles(self, mode: str, num_blocks: int, *, reason: str = "") -> None:
        """Wait until mode, reason and credit of the prompt are these."""

        async def reached() -> bool:
            trust = self.ingester.trust
            if (trust.mode, await self.credits([*HASHES])) != (mode, num_blocks):
                return False
            return reason in trust.reason

        try:
            await until(reached, seconds=5)
        except TimeoutError:
            found = (self.ingester.trust, await self.credits([*HASHES]))
            raise AssertionError(
                f"expected {mode} {num_blocks} {reason!r}, found {found}"
            ) from None


@asynccontextmanager
async def bridged(
    engine: ForeignEngine,
    *,
    has_replay: bool = True,
    rank: int | None = None,
    quiet_s: float = 0.1,
) -> AsyncIterator[Bridged]:
    index = AsyncMemoryIndex()
    subscriber = EventSubscriber(
        engine.endpoint,
        replay_endpoint=engine.replay_endpoint if has_replay else None,
        replay_timeout_s=0.3,
    )
    stream = ForeignStream(
        "a",
        subscriber=subscriber,
        inventory=ForeignInventory(HashScheme()),
        clock=SystemClock(),
        rank=rank,
        quiet_s=quiet_s,
    )
    source = IngestSource(
        snapshot=stream.snapshot,
        report=LoadReport,
        is_alive=lambda: True,
        make_record=record,
        trust=lambda: stream.trust,
        layout=lambda: stream.layout,
    )
    ingester = Ingester(
        A,
        subscriber=stream,
        index=index,
        registry=MemoryRegistry(),
        source=source,
        renew_s=0.1,
    )
    running = asyncio.create_task(ingester.run())
    try:
        await engine.subscribed()
        yield Bridged(engine, stream, ingester, index)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await stream.close()


@pytest.fixture
async def engine() -> AsyncIterator[ForeignEngine]:
    engine = ForeignEngine(max_replay=4)
    yield engine
    await engine.close()


@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_stream_followed_from_its_start_is_exact(
    engine: ForeignEngine, has_replay: bool
) -> None:
    async with bridged(engine, has_replay=has_replay) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        await engine.say(*PROMPT.removed(2))
        await bridge.settles("EXACT", 4)
        await engine.say(AllBlocksCleared())
        await bridge.settles("EXACT", 0)


@pytest.mark.fault("router-15")
async def test_cache_groups_are_registered_as_they_turn_up(engine: ForeignEngine) -> None:
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 40,
    }
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored(kv_cache_spec_kind="full_attention"))
        await bridge.settles("EXACT", 8)
        await engine.say(PROMPT.stored(0, 2, **window))
        await bridge.settles("EXACT", 4)
        assert bridge.ingester.counters.num_registrations == 2
        await engine.say(PROMPT.stored(2, **window))
        await bridge.settles("EXACT", 8)
        await engine.say(*PROMPT.removed(0, 2, group_idx=1))
        await bridge.settles("EXACT", 8)
        await engine.say(*PROMPT.removed(2, 3, group_idx=1))
        await bridge.settles("EXACT", 0)
        assert bridge.ingester.counters.num_registrations == 2


async def test_what_was_published_before_comes_by_replay(engine: ForeignEngine) -> None:
    await engine.say(PROMPT.stored(), delivered=False)
    async with bridged(engine) as bridge:
        await bridge.settles("EXACT", 8)


async def test_an_engine_that_has_published_nothing_yet_is_exactly_empty(
    engine: ForeignEngine,
) -> None:
    async with bridged(engine) as bridge:
        await bridge.settles("EXACT", 0)


@pytest.mark.fault("router-5")
@pytest.mark.parametrize("has_replay", [True, False])
async def test_an_engine_that_never_publishes_is_in_fallback_and_says_so(
    engine: ForeignEngine, has_replay: bool
) -> None:
    engine.answers_replay = False
    async with bridged(engine, has_replay=has_replay) as bridge:
        await bridge.settles("FALLBACK", 0, reason="it has published no KV events yet")
        (state,) = await bridge.index.states()
        assert state.report.mode == "FALLBACK"
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)


@pytest.mark.fault("router-3")
async def test_a_gap_is_filled_by_replay(engine: ForeignEngine) -> None:
    async with bridged(engine, quiet_s=60) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        await engine.say(*PROMPT.removed(2), delivered=False)
        await engine.say(OTHER.stored())
        await bridge.settles("EXACT", 4)
        assert await bridge.credits([*OTHER_HASHES]) == 4
        assert bridge.stream.counters.num_gaps == 1


@pytest.mark.fault("router-3")
@pytest.mark.parametrize("has_replay", [True, False])
async def test_after_a_gap_that_nothing_fills_only_what_is_announced_anew_counts(
    engine: ForeignEngine, has_replay: bool
) -> None:
    async with bridged(engine, has_replay=has_replay) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        for _ in range(5):
            await engine.say(delivered=False)
        await engine.say(OTHER.stored(1))
        await bridge.settles("DEGRADED", 0, reason="its events 1 to 5 are lost")
        assert await bridge.credits([*OTHER_HASHES]) == 0
        await engine.say(PROMPT.stored(0, 2))
        await bridge.settles("DEGRADED", 4)
        await engine.say(AllBlocksCleared(), PROMPT.stored())
        await bridge.settles("EXACT", 8)


@pytest.mark.fault("router-1")
@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_restart_clears_first_and_is_exact_from_its_first_batch(
    engine: ForeignEngine, has_replay: bool
) -> None:
    async with bridged(engine, has_replay=has_replay) as bridge:
        await engine.say(PROMPT.stored())
        await engine.say()
        await bridge.settles("EXACT", 8)
        first_epoch = bridge.ingester.epoch
        engine.restart()
        await engine.say(PROMPT.stored(0, 1))
        await bridge.settles("EXACT", 2)
        assert first_epoch is not None
        assert bridge.ingester.epoch is not None
        assert bridge.ingester.epoch > first_epoch


async def test_a_restart_that_published_more_than_was_seen_before_is_no_gap(
    engine: ForeignEngine,
) -> None:
    """The numbers alone look like one lost batch; the replay shows another process."""
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        engine.restart()
        await engine.say(OTHER.stored(), delivered=False)
        await engine.say(delivered=False)
        await engine.say(PROMPT.stored(0, 1))
        await bridge.settles("EXACT", 2)
        assert await bridge.credits([*OTHER_HASHES]) == 4


async def test_a_frame_that_comes_twice_is_no_restart(engine: ForeignEngine) -> None:
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored(0, 2))
        await engine.say(PROMPT.stored(2))
        await bridge.settles("EXACT", 8)
        epoch = bridge.ingester.epoch
        await engine.send_again(0)
        await engine.say(*PROMPT.removed(3))
        await bridge.settles("EXACT", 6)
        assert bridge.ingester.epoch == epoch


async def test_the_loss_of_the_last_batch_is_found_in_the_silence_after_it(
    engine: ForeignEngine,
) -> None:
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored())
        await engine.say(*PROMPT.removed(2), delivered=False)
        await bridge.settles("EXACT", 4)


async def test_a_lost_connection_to_the_same_process_changes_nothing(
    engine: ForeignEngine,
) -> None:
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        epoch = bridge.ingester.epoch
        await engine.break_connections()
        await engine.say(*PROMPT.removed(3))
        await until(lambda: bridge.stream.counters.num_disconnects == 1)
        await bridge.settles("EXACT", 6)
        assert bridge.ingester.epoch == epoch


async def test_a_lost_connection_counts_as_a_restart_unless_the_process_is_proved_the_same(
    engine: ForeignEngine,
) -> None:
    async with bridged(engine, has_replay=False) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        await engine.break_connections()
        await bridge.settles("DEGRADED", 0, reason="the connection to its events broke")


async def test_a_lost_connection_to_an_engine_that_restarted_clears_at_once(
    engine: ForeignEngine,
) -> None:
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        engine.restart()
        await engine.break_connections()
        await bridge.settles("EXACT", 0)


@pytest.mark.fault("router-9")
@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        encode_batch(EventBatch(0.0, [PROMPT.stored(token_ids=[-1] * 128)], 0)),
    ],
    ids=["garbage", "negative tokens"],
)
async def test_a_batch_that_cannot_be_read_clears_and_the_stream_goes_on(
    engine: ForeignEngine, payload: bytes
) -> None:
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        await engine.say(AllBlocksCleared())
        await bridge.settles("EXACT", 0)
        await engine.say(OTHER.stored())
        await until(partial(_has, bridge, 4))
        await engine.publish_raw(payload)
        await bridge.settles("DEGRADED", 0, reason="its event batch 3 cannot be read")
        assert await bridge.credits([*OTHER_HASHES]) == 0
        await engine.say(PROMPT.stored(0, 1))
        await bridge.settles("DEGRADED", 2)


async def _has(bridge: Bridged, num_blocks: int) -> bool:
    return await bridge.credits([*OTHER_HASHES]) == num_blocks


@pytest.mark.fault("router-6")
async def test_replays_without_a_topic_are_read(engine: ForeignEngine) -> None:
    engine.replays_topic = False
    await engine.say(PROMPT.stored(), delivered=False)
    async with bridged(engine) as bridge:
        await bridge.settles("EXACT", 8)


@pytest.mark.fault("router-10")
async def test_ranks_that_share_a_socket_are_told_apart(engine: ForeignEngine) -> None:
    async with bridged(engine, rank=1) as bridge:
        await engine.say(PROMPT.stored(), rank=1)
        await bridge.settles("EXACT", 8)
        engine.restart()  # The numbers of the other rank begin at 0 as well.
        await engine.say(OTHER.stored(), rank=0)
        await engine.say(*PROMPT.removed(2), rank=1)
        await bridge.settles("EXACT", 4)
        assert await bridge.credits([*OTHER_HASHES]) == 0


async def test_an_emptied_index_is_filled_from_what_is_known(engine: ForeignEngine) -> None:
    async with bridged(engine) as bridge:
        await engine.say(PROMPT.stored())
        await bridge.settles("EXACT", 8)
        bridge.index.index.__init__()  # type: ignore[misc]
        await bridge.settles("EXACT", 8)
