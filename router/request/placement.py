"""Match, plan, reserve: from a prepared request to a place that is held until it is given back.

Every path gives it back exactly once to planner and index alike. Where it goes is the planner's
decision alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine.frontend.errors import RequestError
from kvindex.foundation.clock import Clock
from kvindex.index import Reservation, TargetMatch
from router.fleet.history import OwnHistory
from router.fleet.index_access import IndexAccess
from router.fleet.replica import Replica
from router.fleet.view import FleetView
from router.policy.pending import pending_ttl_s
from router.policy.planner import Outcome, Planner
from router.policy.types import NoReplica, Place, PlanRequest, Shed, TargetView, Wait
from router.request.job import AttemptRecord, Job
from router.request.prepare import Prepared
from router.request.turns import Turns

_TELL_PREFILL_S = 0.05
"""An answer that ends within this time needs one call to the index for its prefill and its end."""


class Placement:
    """A place held by one attempt; give it back with `finish`, in whatever way it ends."""

    def __init__(
        self,
        placer: Placer,
        *,
        unique_id: str,
        attempt: int,
        place: Place,
        replica: Replica,
        hashes: Sequence[bytes],
    ) -> None:
        self._placer = placer
        self._unique_id = unique_id
        self.attempt = attempt
        self.place = place
        self.winner = place.winner
        self.replica = replica
        self.hashes = hashes
        self.telling: asyncio.TimerHandle | None = None
        self._prefill_ended = False

    def first_token(self) -> None:
        """Note that the prefill is over; later calls do nothing."""
        if not self._prefill_ended:
            self._prefill_ended = True
            self._placer.first_token(self, self._unique_id)

    def finish(self, outcome: Outcome, *, num_output_tokens: int = 0) -> None:
        """Give the place back; only the first call counts."""
        self._placer.finish(self, self._unique_id, outcome, num_output_tokens=num_output_tokens)


class Placer:
    """Places requests of any model and keeps planner and index in step."""

    def __init__(
        self,
        *,
        view: FleetView,
        index: IndexAccess | None,
        planner: Planner,
        turns: Turns,
        history: OwnHistory,
        clock: Clock,
        gateway: str,
    ) -> None:
        self._view = view
        self._index = index
        self._planner = planner
        self._turns = turns
        self._history = history
        self._clock = clock
        self._gateway = gateway

    def ask(self, job: Job, prepared: Prepared) -> None:
        """Begin to ask the index for the first placement, while its job waits for something else.

        Whoever drops the job instead of placing it cancels `job.matching`.
        """
        if self._index is not None and self._view.pools_of(job.head.model):
            loop = asyncio.get_running_loop()
            job.matching = loop.create_task(self._match(job, prepared))

    async def place(self, job: Job, prepared: Prepared, *, attempt: int) -> Placement:
        """Choose a replica and reserve it, waiting for a turn where all are busy.

        Raises RequestError `overloaded` or `no_replica`. What was decided in the end is appended
        to the attempts of the job.
        """
        model, has_waited = job.head.model, False
        try:
            while True:
                matches = await self._matches(job, prepared)
                # From here to the placement nothing waits: all of it is of one moment.
                request = self._request(job, prepared, attempt)
                now = self._clock.monotonic()
                decision = self._planner.plan(
                    request, self._views(model, prepared, matches, now), now
                )
                if not isinstance(decision, Wait):
                    break
                has_waited = True
                await self._turns.wait(model, job.unique_id, until=decision.until)
        finally:
            if has_waited:
                self._turns.leave(model, job.unique_id)
        record = msgspec.structs.replace(request, hashes=())
        job.attempts.append(AttemptRecord(attempt=attempt, decision=decision, request=record))
        if not isinstance(decision, Place):
            raise _refusal(model, decision)
        if job.first_token_at is None:
            job.placed_at = self._clock.monotonic()
        placement = Placement(
            self,
            unique_id=job.unique_id,
            attempt=attempt,
            place=decision,
            replica=self._view.serving_as(model, decision.winner.target.replica),
            hashes=prepared.hashes,
        )
        self._reserve(placement, job, prepared, matches)
        return placement

    def _request(self, job: Job, prepared: Prepared, attempt: int) -> PlanRequest:
        tenant = job.tenant
        return PlanRequest(
            request_id=job.unique_id,
            tenant=tenant.name,
            model=job.head.model,
            num_prompt_tokens=_num_prompt_tokens(job, prepared),
            num_total_tokens=prepared.num_total_tokens,
            block_size=prepared.block_size,
            hashes=prepared.hashes,
            isolated=job.is_isolated,
            attempt=attempt,
            tried=self._tried(job) if job.failed_by else frozenset(),
            execution=job.transcript.execution if job.transcript.can_be_resumed else None,
            session=job.session,
            priority=job.priority,
            weight=tenant.weight,
        )

    def _views(
        self,
        model: str,
        prepared: Prepared,
        matches: Sequence[TargetMatch] | None,
        now: float,
    ) -> list[TargetView]:
        views, hashes = self._view.views(model, matches), prepared.hashes
        if not hashes or all(view.mode != "FALLBACK" for view in views):
            return views
        return [
            self._with_history(view, hashes, now) if view.mode == "FALLBACK" else view
            for view in views
        ]

    def _tried(self, job: Job) -> frozenset[str]:
        return frozenset(r.id for r in job.failed_by if not self._view.was_replaced(r))

    def first_token(self, placement: Placement, unique_id: str) -> None:
        """End the prefill of a placement in planner, history and index."""
        self._planner.first_token(unique_id, placement.attempt)
        self._turns.offer()
        now = self._clock.monotonic()
        self._history.note(placement.winner.target, placement.hashes, now)
        pool = placement.replica.pool
        if self._index is not None and pool is not None:
            key = (placement.winner.target, unique_id, placement.attempt)
            placement.telling = asyncio.get_running_loop().call_later(
                _TELL_PREFILL_S, self._index.release_prefill, pool.id, key
            )

    def finish(
        self, placement: Placement, unique_id: str, outcome: Outcome, *, num_output_tokens: int
    ) -> None:
        """Release a placement in planner and index."""
        self._planner.finish(
            unique_id,
            placement.attempt,
            outcome,
            self._clock.monotonic(),
            num_output_tokens=num_output_tokens,
        )
        self._turns.offer()
        if placement.telling is not None:
            placement.telling.cancel()
        pool = placement.replica.pool
        if self._index is not None and pool is not None:
            self._index.release(pool.id, (placement.winner.target, unique_id, placement.attempt))

    def _with_history(self, view: TargetView, hashes: Sequence[bytes], now: float) -> TargetView:
        """Guess what a target holds from our own history."""
        guess = self._history.matched_blocks(view.target, hashes, now)
        return msgspec.structs.replace(view, matched_blocks=guess) if guess else view

    async def _matches(self, job: Job, prepared: Prepared) -> list[TargetMatch] | None:
        """Return what the index knows of a prompt; if `ask` has begun to ask, what it answers."""
        matching, job.matching = job.matching, None
        return await (self._match(job, prepared) if matching is None else matching)

    async def _match(self, job: Job, prepared: Prepared) -> list[TargetMatch] | None:
        """Ask the index of every pool that serves the model, nearly always one.

        No engine takes the last token from its cache, so a block that ends with it is not asked
        about: what a hit of it would need says nothing about a shorter one.
        """
        pools = self._view.pools_of(job.head.model)
        if self._index is None or not pools:
            return None
        last = _num_prompt_tokens(job, prepared) - 1
        calls = [
            self._index.match(pool.id, prepared.hashes[: last // pool.scheme.block_size])
            for pool in pools
        ]
        answers = await asyncio.gather(*calls) if len(calls) > 1 else [await calls[0]]
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers):
            return None
        return [match for answer in known for match in answer]

    def _reserve(
        self,
        placement: Placement,
        job: Job,
        prepared: Prepared,
        matches: list[TargetMatch] | None,
    ) -> None:
        pool = placement.replica.pool
        if self._index is None or pool is None:
            return
        winner = placement.winner
        matched = next((m.matched_blocks for m in matches or () if m.target == winner.target), 0)
        reservation = Reservation(
            request_id=job.unique_id,
            attempt=placement.attempt,
            target=winner.target,
            gateway=self._gateway,
            prefill_tokens=winner.num_uncached_tokens,
            num_blocks=-(-prepared.num_total_tokens // pool.scheme.block_size),
            pending=prepared.hashes[matched:],
            pending_ttl_s=pending_ttl_s(winner.expected_s),
        )
        # Not waited for: others hear of it as soon, and the replica of its request sooner.
        self._index.reserve(pool.id, reservation)


def _num_prompt_tokens(job: Job, prepared: Prepared) -> int:
    """Count what has to be computed: what was answered before is like a part of the prompt."""
    return prepared.num_prompt_tokens + job.transcript.num_tokens


def _refusal(model: str, decision: Shed | NoReplica) -> RequestError:
    if isinstance(decision, Shed):
        message = f"every replica of {model} is too far behind; try again later"
        return RequestError("overloaded", message, retry_after_s=decision.retry_after_s)
    message = f"no replica can serve {model} now: {decision.reason}"
    return RequestError("no_replica", message, retry_after_s=decision.retry_after_s)


def note_failure(job: Job, replica: Replica, failure: str) -> None:
    """Write into the newest attempt why it failed; this replica process is not asked again."""
    job.attempts[-1] = msgspec.structs.replace(job.attempts[-1], failure=failure)
    job.failed_by.append(replica)
