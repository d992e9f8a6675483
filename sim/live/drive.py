"""Sends a trace to a live fleet, one request at a time or by its clock, and notes what came back.

Nothing is compared here. Where the fleet has an admin API, each answer comes with the gateway's
own record of its decision.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from kvindex.foundation.errors import PrefixFleetError
from router.policy.types import Candidate, Place
from sim.live.client import LiveClient
from sim.live.messages import Completion, LiveRecord, LiveReplica, Received
from sim.live.prompts import PromptMaker
from sim.live.together import together
from sim.traces.row import TraceRow

_RECORD_S = 2.0
_INDEX_S = 2.0
_RESET_S = 10.0
_POLL_S = 0.002
_PAUSE_S = 0.05


class Driven(msgspec.Struct, frozen=True, kw_only=True):
    """One row and what became of it live; `index_lagged` if its blocks did not show up in time."""

    row: TraceRow
    received: Received
    record: LiveRecord | None = None
    index_lagged: bool = False

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What its first decision weighed; empty when that is not known."""
        if self.record is None or not self.record.attempts:
            return ()
        return self.record.attempts[0].decision.candidates

    @property
    def replica(self) -> str | None:
        """Who served it; None when that is not known.

        The answer's head says so, unless it had gone out while the request still waited.
        """
        if self.received.replica is not None or self.placed is None:
            return self.received.replica
        return self.placed.winner.target.replica

    @property
    def placed(self) -> Place | None:
        """Where it was placed last, None when that is not known or nowhere."""
        attempts = self.record.attempts if self.record is not None else ()
        decisions = [attempt.decision for attempt in reversed(attempts)]
        return next((d for d in decisions if isinstance(d, Place)), None)


class Driver:
    """Plays rows on one fleet; `done` is called after each answer."""

    def __init__(
        self,
        client: LiveClient,
        prompts: PromptMaker,
        *,
        model: str,
        done: Callable[[], None],
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._model = model
        self._done = done

    async def one_by_one(self, rows: Sequence[TraceRow]) -> list[Driven]:
        """Send each row after the answer to the one before, when the index knows of that.

        Without an admin API there is nobody to ask, and a short pause has to do.
        """
        driven = []
        for row in rows:
            wanted = self._completion(row)
            received = await self._client.complete(wanted)
            record = None
            if self._client.has_admin:
                record = await self._record(received)
            else:
                await asyncio.sleep(_PAUSE_S)
            one = Driven(row=row, received=received, record=record)
            lagged = not await self._index_follows(wanted, one)
            driven.append(msgspec.structs.replace(one, index_lagged=lagged))
            self._done()
        return driven

    async def by_the_clock(self, rows: Sequence[TraceRow], *, speed_up: float) -> list[Driven]:
        """Send each row at its time, whatever the fleet does."""
        wanted = [self._completion(row) for row in rows]
        started_at = time.monotonic()
        first_s = rows[0].arrival_s if rows else 0.0

        async def send(row: TraceRow, completion: Completion) -> Received:
            due_at = started_at + (row.arrival_s - first_s) / speed_up
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            received = await self._client.complete(completion)
            self._done()
            return received

        answers = await together(map(send, rows, wanted))
        driven = []
        for row, received in zip(rows, answers, strict=True):
            record = await self._record(received) if self._client.has_admin else None
            driven.append(Driven(row=row, received=received, record=record))
        return driven

    def _completion(self, row: TraceRow) -> Completion:
        return Completion(
            model=self._model,
            prompt=self._prompts.prompt(row),
            num_output_tokens=max(1, row.output_length),
            seed=row.line,
            session=row.session_id,
            priority=row.priority,
        )

    async def _record(self, received: Received) -> LiveRecord | None:
        if received.request_id is None:
            return None
        return await self._client.record(received.request_id, within_s=_RECORD_S)

    async def _index_follows(self, wanted: Completion, one: Driven) -> bool:
        """Wait until the index has all of a prompt where it was served; False if it never does."""
        record, placed = one.record, one.placed
        if record is None or placed is None or one.received.error is not None:
            return True
        deadline = time.monotonic() + _INDEX_S
        while placed.winner.mode == "EXACT":
            held = await self._client.holds(wanted.prompt, model=wanted.model, tenant=record.tenant)
            matched = {holding.target: holding.matched_blocks for holding in held.targets}
            if matched.get(str(placed.winner.target)) == held.num_blocks:
                break
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True


async def empty_caches(client: LiveClient, model: str) -> list[LiveReplica]:
    """Empty the cache of every live replica that serves the model; return these replicas.

    Returns when the gateway has seen it. Raises PrefixFleetError when there is no such replica,
    or when the index still counts blocks after some seconds.
    """
    replicas = await _serving(client, model)
    if not replicas:
        raise PrefixFleetError(f"no live replica serves {model!r}; see `prefixfleet replica list`")
    for replica in replicas:
        await client.reset_cache(replica.id)
    deadline = time.monotonic() + _RESET_S
    while any(replica.num_held for replica in await _serving(client, model)):
        if time.monotonic() > deadline:
            raise PrefixFleetError(
                "the index still counts blocks after a reset; is other traffic running?"
            )
        await asyncio.sleep(_PAUSE_S)
    return replicas


async def _serving(client: LiveClient, model: str) -> list[LiveReplica]:
    fleet = await client.fleet()
    return [r for r in fleet.replicas if r.live and model in r.served_models]
