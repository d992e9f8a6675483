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
from router.fleet.index_access import IndexAccess, Release
from router.fleet.replica import Replica
from router.fleet.view import FleetView
from router.policy.planner import Outcome, Planner
from router.policy.types import Candidate, NoReplica, Place, PlanRequest, Shed
from router.request.background import Background
from router.request.job import AttemptRecord, Job
from router.request.prepare import Prepared

_MIN_PENDING_S = 5.0
_MAX_PENDING_S = 120.0


class Placement:
    """A place held by one attempt; give it back with `finish`, in whatever way it ends."""

    def __init__(
        self, placer: Placer, *, unique_id: str, attempt: int, place: Place, replica: Replica
    ) -> None:
        self._placer = placer
        self._unique_id = unique_id
        self.attempt = attempt
        self.place = place
        self.replica = replica
        self._prefill_ended = False

    @property
    def winner(self) -> Candidate:
        """The chosen target."""
        return self.place.winner

    def first_token(self) -> None:
        """Note that the prefill is over; later calls do nothing."""
        if not self._prefill_ended:
            self._prefill_ended = True
            self._placer.first_token(self, self._unique_id)

    def finish(self, outcome: Outcome) -> None:
        """Give the place back; only the first call counts."""
        self._placer.finish(self, self._unique_id, outcome)


class Placer:
    """Places requests of any model and keeps planner and index in step."""

    def __init__(
        self,
        *,
        view: FleetView,
        index: IndexAccess | None,
        planner: Planner,
        background: Background,
        clock: Clock,
        gateway: str,
    ) -> None:
        self._view = view
        self._index = index
        self._planner = planner
        self._background = background
        self._clock = clock
        self._gateway = gateway

    async def place(self, job: Job, prepared: Prepared, *, attempt: int) -> Placement:
        """Choose a replica and reserve it; raise RequestError `overloaded` or `no_replica`.

        The decision is appended to the attempts of the job.
        """
        model = job.head.model
        pools = {r.pool.id: r.pool for r in self._view.serving(model) if r.pool is not None}
        matches = await self._match(sorted(pools), prepared) if pools else None
        # From here to the plan nothing waits: views and replicas are of one moment.
        replicas = {replica.id: replica for replica in self._view.serving(model)}
        scheme = next((pool.scheme for pool in pools.values()), None)
        request = PlanRequest(
            request_id=job.unique_id,
            tenant=job.tenant.name,
            model=model,
            num_prompt_tokens=prepared.num_prompt_tokens,
            num_total_tokens=prepared.num_total_tokens,
            block_size=scheme.block_size if scheme is not None and prepared.hashes else None,
            hashes=prepared.hashes,
            isolated=job.is_isolated,
            attempt=attempt,
            tried=job.tried,
        )
        views = self._view.views(model, matches)
        decision = self._planner.plan(request, views, self._clock.monotonic())
        job.attempts.append(AttemptRecord(attempt=attempt, decision=decision))
        if not isinstance(decision, Place):
            raise _refusal(model, decision)
        placement = Placement(
            self,
            unique_id=job.unique_id,
            attempt=attempt,
            place=decision,
            replica=replicas[decision.winner.target.replica],
        )
        await self._reserve(placement, job, prepared, matches)
        return placement

    def first_token(self, placement: Placement, unique_id: str) -> None:
        """End the prefill of a placement in planner and index."""
        self._planner.first_token(unique_id, placement.attempt)
        pool = placement.replica.pool
        if self._index is not None and pool is not None:
            key = (placement.winner.target, unique_id, placement.attempt)
            self._background.start(self._index.release_prefill(pool.id, key))

    def finish(self, placement: Placement, unique_id: str, outcome: Outcome) -> None:
        """Release a placement in planner and index."""
        now = self._clock.monotonic()
        self._planner.finish(unique_id, placement.attempt, outcome, now)
        pool = placement.replica.pool
        if self._index is not None and pool is not None:
            release = Release(
                pool=pool.id,
                target=placement.winner.target,
                request_id=unique_id,
                attempt=placement.attempt,
            )
            self._background.start(self._index.release(release))

    async def _match(self, pools: Sequence[str], prepared: Prepared) -> list[TargetMatch] | None:
        """Ask the index of every pool that serves the model, nearly always one."""
        if self._index is None:
            return None
        answers = await asyncio.gather(
            *(self._index.match(pool, prepared.hashes) for pool in pools)
        )
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers):
            return None
        return [match for answer in known for match in answer]

    async def _reserve(
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
        pending_s = min(_MAX_PENDING_S, max(_MIN_PENDING_S, 2 * winner.expected_s))
        reservation = Reservation(
            request_id=job.unique_id,
            attempt=placement.attempt,
            target=winner.target,
            gateway=self._gateway,
            prefill_tokens=winner.num_uncached_tokens,
            num_blocks=-(-prepared.num_total_tokens // pool.scheme.block_size),
            pending=prepared.hashes[matched:],
            pending_ttl_s=pending_s,
        )
        try:
            await self._index.reserve(pool.id, reservation)
        except BaseException:
            placement.finish("abandoned")
            raise


def _refusal(model: str, decision: Shed | NoReplica) -> RequestError:
    if isinstance(decision, Shed):
        message = f"every replica of {model} is too far behind; try again later"
        return RequestError("overloaded", message, retry_after_s=decision.retry_after_s)
    message = f"no replica can serve {model} now: {decision.reason}"
    return RequestError("no_replica", message, retry_after_s=decision.retry_after_s)


def note_failure(job: Job, failure: str) -> None:
    """Write into the newest attempt why it failed, which also excludes its replica."""
    job.attempts[-1] = msgspec.structs.replace(job.attempts[-1], failure=failure)
