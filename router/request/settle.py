"""The end of every request: predicted against realised, metrics, decision record, access line.

Places are given back by dispatch; this only tells what happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.frontend.errors import RequestError
from kvindex.foundation.clock import Clock
from router.observe.access_log import log_refusal, log_request
from router.observe.decisions import DecisionLog, DecisionRecord
from router.observe.metrics import GatewayMetrics
from router.request.job import Job

UNKNOWN_MODEL = "unknown"
CLIENT_GONE = 499
"""The status that a client which hung up would have seen; nginx's number for it."""


@dataclass(slots=True)
class Refusal:
    """A request that has not become a job yet; `is_over` once it has."""

    tenant: str = "unknown"
    is_over: bool = False


class Settler:
    """Settles each job once."""

    def __init__(self, *, metrics: GatewayMetrics, decisions: DecisionLog, clock: Clock) -> None:
        self._metrics = metrics
        self._decisions = decisions
        self._clock = clock

    @contextmanager
    def refusals(self, request_id: str, path: str) -> Iterator[Refusal]:
        """Count and log a request that is refused before it becomes a job."""
        refusal = Refusal()
        try:
            yield refusal
        except RequestError as error:
            if not refusal.is_over:
                status = error.shape.status
                self._metrics.requests.labels(
                    UNKNOWN_MODEL, refusal.tenant, "none", str(status)
                ).inc()
                log_refusal(request_id, path=path, tenant=refusal.tenant, status=status)
            raise

    def settle(self, job: Job, *, status: int) -> None:
        """Write down a finished job; `status` is what the client got, or would have got."""
        now = self._clock.monotonic()
        place = job.placed
        ttft_s = None if job.first_token_at is None else job.first_token_at - job.started_at
        record = DecisionRecord(
            request_id=job.request_id,
            unique_id=job.unique_id,
            at=self._clock.now(),
            tenant=job.tenant.name,
            model=job.head.model,
            status=status,
            num_prompt_tokens=job.prepared.num_prompt_tokens if job.prepared else None,
            num_predicted_tokens=place.winner.num_cached_tokens if place else None,
            usage=job.usage,
            ttft_s=ttft_s,
            duration_s=now - job.started_at,
            attempts=job.attempts,
        )
        self._decisions.add(record)
        self._count(job, record, policy=place.policy if place else "none")
        log_request(
            record,
            path=f"/v1/{job.endpoint}",
            key_alias=job.key_alias,
            replica=place.winner.target.replica if place else None,
        )

    def _count(self, job: Job, record: DecisionRecord, *, policy: str) -> None:
        # A model that nobody serves is the client's invention, and no label.
        labels = (record.model if job.model_is_known else UNKNOWN_MODEL, record.tenant)
        metrics = self._metrics
        metrics.requests.labels(*labels, policy, str(record.status)).inc()
        metrics.duration.labels(*labels).observe(record.duration_s)
        if record.ttft_s is not None:
            metrics.ttft.labels(*labels).observe(record.ttft_s)
        usage = record.usage
        if usage is None:
            return
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        metrics.completion_tokens.labels(*labels).inc(usage.completion_tokens)
        if usage.cached_tokens is None or record.num_predicted_tokens is None:
            return
        metrics.predicted.labels(*labels).inc(record.num_predicted_tokens)
        metrics.realised.labels(*labels).inc(usage.cached_tokens)
        difference = usage.cached_tokens - record.num_predicted_tokens
        if difference:
            metrics.mispredicted.labels(*labels, "more" if difference > 0 else "less").inc()
