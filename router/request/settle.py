"""The end of every request: predicted against realised, metrics, decision record, access line.

Places are given back by dispatch; this only tells what happened.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.frontend.errors import RequestError
from kvindex.foundation.clock import Clock
from router.observe.access_log import log_refusal, log_request
from router.observe.causes import Cause, available_tokens, cause_of
from router.observe.decisions import DecisionLog, DecisionRecord
from router.observe.metrics import GatewayMetrics
from router.observe.prefix_tally import PrefixTally
from router.observe.recorder import Recorder
from router.request.claim import usage_of
from router.request.job import Job
from router.request.record import recorded
from router.tenancy.tenancy import Tenancy
from router.tenancy.usage_files import UsageFiles

UNKNOWN_MODEL = "unknown"


@dataclass(slots=True)
class Refusal:
    """A request that has not become a job yet, as a context; `is_over` once it has."""

    metrics: GatewayMetrics
    request_id: str
    path: str
    tenant: str = "unknown"
    is_over: bool = False

    def __enter__(self) -> Refusal:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.is_over or not isinstance(error, RequestError):
            return
        status = error.shape.status
        self.metrics.requests.labels(UNKNOWN_MODEL, self.tenant, "none", status).inc()
        log_refusal(self.request_id, path=self.path, tenant=self.tenant, status=status)


class Settler:
    """Settles each job once."""

    def __init__(
        self,
        *,
        metrics: GatewayMetrics,
        decisions: DecisionLog,
        clock: Clock,
        gateway: str,
        tenancy: Tenancy,
        recorder: Recorder | None,
        usage_files: UsageFiles | None,
        prefixes: PrefixTally,
    ) -> None:
        self._prefixes = prefixes
        self._recorder = recorder
        self._usage_files = usage_files
        self._tenancy = tenancy
        self._metrics = metrics
        self._decisions = decisions
        self._clock = clock
        self._gateway = gateway

    def refusals(self, request_id: str, path: str) -> Refusal:
        """Count and log a request that is refused before it becomes a job."""
        return Refusal(self._metrics, request_id, path)

    def opened(self, job: Job) -> None:
        """Note that a job has begun; `settle` is told of each such one."""
        if self._recorder is not None:
            job.record_number = self._recorder.arrived()

    def settle(self, job: Job, *, status: int) -> None:
        """Write down a finished job; `status` is what the client got, or would have got."""
        now = self._clock.monotonic()
        record = self._record(job, status=status, now=now)
        self._decisions.add(record)
        self._tally(job, record, now)
        self._charge(job, record)
        if self._recorder is not None and job.record_number is not None:
            self._recorder.end(job.record_number, recorded(job, status=status))
        place = job.placed
        self._count(job, record, policy=place.policy if place else "none")
        log_request(
            record,
            path=f"/v1/{job.endpoint}",
            key_alias=job.key_alias,
            replica=place.winner.target.replica if place else None,
        )

    def _record(self, job: Job, *, status: int, now: float) -> DecisionRecord:
        place, prepared = job.served or job.placed, job.prepared
        return DecisionRecord(
            request_id=job.request_id,
            unique_id=job.unique_id,
            at=self._clock.now(),
            tenant=job.tenant.name,
            model=job.head.model,
            status=status,
            num_prompt_tokens=prepared.num_prompt_tokens if prepared else None,
            num_predicted_tokens=place.winner.num_cached_tokens if place else None,
            usage=job.usage,
            ttft_s=job.ttft_s,
            duration_s=now - job.started_at,
            attempts=job.attempts,
            gateway=self._gateway,
            num_available_tokens=available_tokens(place) if place else None,
            cause=_cause(job),
            queue_s=job.queue_s,
            num_resumes=job.num_resumes,
        )

    def _tally(self, job: Job, record: DecisionRecord, now: float) -> None:
        if job.prepared is not None and job.block_size is not None:
            self._prefixes.add(
                job.prepared.hashes,
                block_size=job.block_size,
                model=record.model,
                tenant=record.tenant,
                now=now,
            )

    def _charge(self, job: Job, record: DecisionRecord) -> None:
        """Charge the tenant for what ran of a job that its limits had let in."""
        if job.grant is not None:
            usage = usage_of(job, record)
            self._metrics.charged_tokens_of(usage.model, usage.tenant).inc(usage.charged_tokens)
            self._tenancy.settle(job.grant, usage)
            if self._usage_files is not None:
                self._usage_files.write(usage)

    def _count(self, job: Job, record: DecisionRecord, *, policy: str) -> None:
        # A model that nobody serves is the client's invention, and no label.
        labels = (record.model if job.model_is_known else UNKNOWN_MODEL, record.tenant)
        self._metrics.requests_of(*labels, policy, record.status).inc()
        timings, usage = self._metrics.timings_of(*labels), record.usage
        timings.duration.observe(record.duration_s)
        if record.ttft_s is not None:
            timings.ttft.observe(record.ttft_s)
        if usage is None:
            return
        metrics = self._metrics.tokens_of(*labels)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.completion_tokens.inc(usage.completion_tokens)
        if usage.cached_tokens is None or record.num_predicted_tokens is None:
            return
        if record.num_available_tokens:
            metrics.available.inc(record.num_available_tokens)
        if record.num_predicted_tokens:
            metrics.predicted.inc(record.num_predicted_tokens)
        if usage.cached_tokens:
            metrics.realised.inc(usage.cached_tokens)
        place = job.served or job.placed
        if place is not None:
            prompts, cached = self._metrics.prompts_of(place.winner.target.replica)
            prompts.inc(usage.prompt_tokens)
            if usage.cached_tokens:
                cached.inc(usage.cached_tokens)
        if record.cause is not None:
            self._metrics.causes_of(*labels, record.cause).inc()


def _cause(job: Job) -> Cause | None:
    """Say why the replica that served a job found another number of tokens cached."""
    if job.served is None or job.usage is None or job.prepared is None:
        return None
    return cause_of(
        job.served,
        job.usage,
        num_prompt_tokens=job.prepared.num_prompt_tokens,
        num_prompts=len(job.prepared.prompts),
        is_foreign=job.served_by_foreign,
    )
