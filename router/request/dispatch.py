"""Carries out plans: sends a request, tries another replica when one fails, resumes streams.

Which replica is the planner's choice; this module only decides whether there is a next attempt. As
long as the client has seen nothing, the next one begins anew; afterwards it goes on where the last
chunk ended, if the replicas are ours, and else the stream ends with a typed error.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Mapping

import msgspec

from engine.frontend.errors import RequestError
from kvindex.foundation.clock import Clock
from router.config import RouterConfig
from router.fleet.client import ReplicaFailure
from router.observe.metrics import GatewayMetrics
from router.policy.quarantine import Quarantine
from router.policy.retry_budget import RetryBudget
from router.request.attempt import AttemptRunner
from router.request.client_stream import ClientStream
from router.request.failure import as_request_error, quarantined
from router.request.job import Job
from router.request.placement import Placement, Placer, note_failure
from router.request.prepare import Prepared
from router.request.sinks import FoldSink, Sink, StreamSink

log = logging.getLogger("prefixfleet.router.dispatch")

MAX_DEATHS = 2
"""A request that was running on this many replicas when they died is not given to a third."""
_MAY_BE_ITS_FAULT = frozenset({"lost", "stalled", "timeout"})
QUARANTINE_S = 600.0
_PLACE_WAIT_S = 0.5
"""A stream that has begun waits so long for a place elsewhere, once for each attempt left."""
_MAX_QUARANTINED = 10_000

OfferHeaders = Callable[[Mapping[str, str]], None]


class Dispatcher:
    """Serves prepared requests."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        placer: Placer,
        runner: AttemptRunner,
        budget: RetryBudget,
        clock: Clock,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._placer = placer
        self._runner = runner
        self._clock = clock
        self._metrics = metrics
        self._budget = budget
        self._quarantine = Quarantine(QUARANTINE_S, _MAX_QUARANTINED)
        self._random = random.Random()

    async def stream(self, job: Job, prepared: Prepared, stream: ClientStream) -> None:
        """Serve a streaming client.

        Raises RequestError only while nothing was sent; afterwards the error is the last event.
        """
        sink = StreamSink(stream, include_usage=job.head.include_usage)
        try:
            await self._attempts(job, prepared, sink, stream.offer_headers)
        except RequestError as error:
            if not stream.started:
                raise
            job.late_error = error
            await stream.fail(error)
        await stream.finish()

    async def whole(self, job: Job, prepared: Prepared) -> tuple[bytes, dict[str, str]]:
        """Serve a client that waits for one answer: its body and headers."""
        headers: dict[str, str] = {}
        sink = FoldSink(job.endpoint)
        body = await self._attempts(job, prepared, sink, headers.update)
        return sink.answer if body is None else body, headers

    async def _attempts(
        self, job: Job, prepared: Prepared, sink: Sink, offer_headers: OfferHeaders
    ) -> bytes | None:
        """Try replicas until one serves; return the body of an answer that was no stream."""
        self._refuse_poison(job, prepared)
        self._budget.note_request()
        last: ReplicaFailure | None = None
        num_deaths = attempt = 0
        num_left = self._config.max_attempts
        while num_left > 0:
            attempt += 1
            if last is not None and not await self._may_retry(job, last):
                break
            placement = await self._place(job, prepared, sink, attempt=attempt, last=last)
            if placement is None:
                if job.first_token_at is None:
                    break
                num_left -= 1
                await asyncio.sleep(_PLACE_WAIT_S)
                continue
            offer_headers(decision_headers(job))
            try:
                return await self._runner.run(job, prepared, placement, sink)
            except ReplicaFailure as failure:
                last = failure
                num_left -= failure.cause != "drained"
                self._note(job, placement, failure)
                num_deaths += failure.cause in _MAY_BE_ITS_FAULT
                if num_deaths >= MAX_DEATHS or not failure.is_retriable:
                    break
                if not job.transcript.can_be_resumed and not _begin_anew(job, sink):
                    log.warning(
                        "cannot be resumed request_id=%s tokens_known=%d",
                        job.request_id,
                        job.transcript.num_tokens,
                    )
                    break
        assert last is not None, "max_attempts is at least 1"
        self._condemn(job, prepared)
        raise as_request_error(last, has_begun=job.first_token_at is not None)

    async def _place(
        self,
        job: Job,
        prepared: Prepared,
        sink: Sink,
        *,
        attempt: int,
        last: ReplicaFailure | None,
    ) -> Placement | None:
        """Find a place for an attempt, None when there is none for another one.

        An answer that nobody can go on with may still be begun anew, if the client saw nothing.
        """
        try:
            placement = await self._placer.place(job, prepared, attempt=attempt)
        except RequestError as refusal:
            if last is None:
                raise
            log.warning(
                "no place request_id=%s attempt=%d reason=%r",
                job.request_id,
                attempt,
                refusal.message,
            )
            if not job.transcript.can_be_resumed or not _begin_anew(job, sink):
                return None
            return await self._place(job, prepared, sink, attempt=attempt, last=last)
        if last is not None:
            self._metrics.retries.labels(placement.replica.id, last.cause).inc()
        if job.transcript.can_be_resumed:
            self._metrics.resumes.labels(placement.replica.id).inc()
            job.num_resumes += 1
        return placement

    async def _may_retry(self, job: Job, last: ReplicaFailure) -> bool:
        """Take a retry out of the budget; wait a moment, so that failures do not march in step.

        A replica that ends in order is no failure: what it held moves on freely.
        """
        if last.cause == "drained":
            return True
        if not self._budget.take():
            log.warning("retry budget spent request_id=%s", job.request_id)
            self._metrics.retries_denied.inc()
            return False
        await asyncio.sleep(self._random.uniform(0, self._config.retry_jitter_s))
        return True

    def _note(self, job: Job, placement: Placement, failure: ReplicaFailure) -> None:
        job.num_deaths += failure.cause == "lost"
        note_failure(job, placement.replica, str(failure))
        log.warning(
            "attempt failed request_id=%s attempt=%d cause=%s reason=%r",
            job.request_id,
            placement.attempt,
            failure.cause,
            str(failure),
        )

    def _refuse_poison(self, job: Job, prepared: Prepared) -> None:
        if not self._quarantine.is_empty:
            left_s = self._quarantine.left_s(_digest(job, prepared), self._clock.monotonic())
            if left_s is not None:
                raise quarantined(left_s)

    def _condemn(self, job: Job, prepared: Prepared) -> None:
        """Quarantine a request that was running on two replicas when they died."""
        if job.num_deaths < MAX_DEATHS:
            return
        self._quarantine.add(_digest(job, prepared), self._clock.monotonic())
        self._metrics.quarantined.inc()
        log.error(
            "request quarantined request_id=%s deaths=%d quarantine_s=%g",
            job.request_id,
            job.num_deaths,
            QUARANTINE_S,
        )


def decision_headers(job: Job) -> dict[str, str]:
    """Describe the newest placement in the headers of the answer."""
    place = job.placed
    if place is None:
        return {}
    return {
        "x-prefixfleet-replica": place.winner.target.replica,
        "x-prefixfleet-policy": place.policy,
        "x-prefixfleet-mode": place.winner.mode,
        "x-prefixfleet-cached-tokens-predicted": str(place.winner.num_cached_tokens),
    }


def _begin_anew(job: Job, sink: Sink) -> bool:
    """Forget what was answered so far; False when the client has seen some of it."""
    if not sink.restart():
        return False
    job.forget_output()
    return True


def _digest(job: Job, prepared: Prepared) -> bytes:
    """Name what a request asks of a replica; who asks, and under which id, is left out."""
    asked = (job.endpoint, job.head.model, prepared.prompts or job.body)
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()
