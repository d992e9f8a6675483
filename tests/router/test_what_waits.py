"""What waits for what on a request's way: stores are asked and told beside it where they can be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvindex.foundation.clock import SystemClock
from kvindex.index import Reservation, Target, TargetMatch
from kvindex.memory_index import AsyncMemoryIndex, MemoryIndex
from router.config import Limits, TenantConfig, TenantKey
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import Claim, Verdict
from router.tenancy.local_limiter import LocalLimiter
from router.tenancy.memory_store import MemoryTenantStore
from router.tenancy.stores import TenancyStores
from tests.conditions import until
from tests.router.fake_replica import key_hash
from tests.router.running_gateway import (
    ACME_KEY,
    MemoryStores,
    chat,
    gateway_spec,
    running_gateway,
)


def an_open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass(slots=True)
class Gates:
    """The calls that have come, in order, and the gates that some of them wait at."""

    calls: list[str] = field(default_factory=list)
    match: asyncio.Event = field(default_factory=an_open_gate)
    reserve: asyncio.Event = field(default_factory=an_open_gate)


class GatedIndex(AsyncMemoryIndex):
    """An index whose answers come when the gates are open."""

    def __init__(self, index: MemoryIndex, gates: Gates) -> None:
        super().__init__(index)
        self._gates = gates

    async def match(self, hashes: Sequence[bytes]) -> list[TargetMatch]:
        self._gates.calls.append("match")
        await self._gates.match.wait()
        return await super().match(hashes)

    async def reserve(self, reservation: Reservation) -> None:
        self._gates.calls.append("reserve")
        await self._gates.reserve.wait()
        await super().reserve(reservation)

    async def release(
        self, target: Target, request_id: str, attempt: int, *, written: bool
    ) -> None:
        self._gates.calls.append("release")
        await super().release(target, request_id, attempt, written=written)


class GatedStores(MemoryStores):
    """Stores whose index waits at gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = Gates()

    def index(self, pool: str) -> AsyncMemoryIndex:
        return GatedIndex(self.memory(pool), self.gates)


class GatedLimiter(LocalLimiter):
    """Limits that answer when the gate is open."""

    gate: asyncio.Event

    async def reserve(self, claim: Claim) -> Verdict:
        await self.gate.wait()
        return await super().reserve(claim)


async def test_a_replica_has_its_request_before_the_index_has_answered() -> None:
    stores = GatedStores()
    stores.gates.reserve.clear()
    async with running_gateway(replicas=1, stores=stores) as running:
        status, _, _ = await running.post("/v1/chat/completions", chat("hello"))
        assert (status, stores.gates.calls) == (200, ["match", "reserve"])
        stores.gates.reserve.set()
        # Whatever the order of the end and of the answer: what is reserved is released after it.
        await until(lambda: stores.gates.calls == ["match", "reserve", "release"])
        await running.nothing_runs()


async def test_the_index_is_asked_while_limits_are() -> None:
    stores, gate = GatedStores(), asyncio.Event()

    def tenancy(gateway: str) -> TenancyStores:
        limiter = GatedLimiter(LimitLedger(), gateway=gateway, clock=SystemClock())
        limiter.gate = gate
        return TenancyStores(store=MemoryTenantStore(), limiter=limiter, usage=limiter)

    async with running_gateway(replicas=1, stores=stores, tenancy=tenancy) as running:
        answer = asyncio.create_task(running.post("/v1/chat/completions", chat("hello")))
        await until(lambda: stores.gates.calls == ["match"])
        assert not answer.done()
        gate.set()
        assert (await answer)[0] == 200
        await until(lambda: stores.gates.calls == ["match", "reserve", "release"])


@pytest.mark.parametrize("is_slow", [False, True], ids=["quick index", "slow index"])
async def test_whom_limits_refuse_is_not_waited_for_and_leaves_nothing(is_slow: bool) -> None:
    stores = GatedStores()
    key = TenantKey(hash=key_hash(ACME_KEY))
    tenant = TenantConfig(name="acme", keys=(key,), limits=Limits(requests_per_minute=1))
    async with running_gateway(
        gateway_spec(tenants=(tenant,)), replicas=1, stores=stores
    ) as running:
        assert (await running.post("/v1/chat/completions", chat("hello")))[0] == 200
        await running.nothing_runs()
        stores.gates.calls.clear()
        if is_slow:
            stores.gates.match.clear()
        assert (await running.post("/v1/chat/completions", chat("hello")))[0] == 429
        assert stores.gates.calls in ([], ["match"])
        await running.nothing_runs()
