"""The claim of a prepared request against its tenant's limits, and what it came to in the end.

A claim is the prompt and the expected output, never the whole context. What is charged is what the
replica says; for a stream that was cut off, what had run by then.
"""

from __future__ import annotations

import logging
import math

from engine.frontend.charge import charge
from engine.frontend.params import COMPLETION_MAX_TOKENS
from router.observe.decisions import DecisionRecord
from router.observe.metrics import GatewayMetrics
from router.request.job import Job
from router.request.limit_headers import budgets_of
from router.request.prepare import Prepared
from router.request.usage import RealisedUsage
from router.tenancy.limits import Claim, Verdict
from router.tenancy.tenancy import Grant, Tenancy
from router.tenancy.usage import Outcome, UsageRecord

log = logging.getLogger("prefixfleet.router.limits")

CLIENT_GONE = 499
"""The status that a client which hung up would have seen; nginx's number for it."""


async def claim_tokens(
    job: Job, prepared: Prepared, *, tenancy: Tenancy, metrics: GatewayMetrics
) -> Grant:
    """Reserve what a job is expected to take, and note the grant; raise what Tenancy raises.

    The job's identity becomes the one that holds now.
    """
    grant = await tenancy.reserve(
        job.identity,
        id=job.unique_id,
        model=job.asked_model,
        num_prompt_tokens=prepared.num_prompt_tokens,
        max_tokens=_max_output(job, prepared),
    )
    job.grant, job.identity = grant, grant.identity
    _watch_budgets(job, grant.claim, grant.verdict, metrics)
    return grant


def usage_of(job: Job, record: DecisionRecord) -> UsageRecord:
    """Return what a finished job is charged; `record` tells the rest of it."""
    realised = job.usage or _run_so_far(job, record.status)
    cached = realised.cached_tokens or 0
    uncached = realised.prompt_tokens - cached
    charged = charge(
        num_uncached_tokens=uncached,
        num_cached_tokens=cached,
        num_output_tokens=realised.completion_tokens,
    )
    return UsageRecord(
        at=record.at,
        request_id=record.request_id,
        tenant=record.tenant,
        key=job.key_alias,
        model=record.model,
        uncached_tokens=uncached,
        cached_tokens=cached,
        output_tokens=realised.completion_tokens,
        charged_tokens=math.ceil(charged),
        queue_s=record.queue_s,
        ttft_s=record.ttft_s,
        duration_s=record.duration_s,
        status=record.status,
        outcome=_outcome(record.status),
        user=job.head.user,
    )


def _outcome(status: int) -> Outcome:
    if status == CLIENT_GONE:
        return "cancelled"
    return "ok" if status < 400 else "failed"


def _max_output(job: Job, prepared: Prepared) -> int | None:
    """Return how much output the client allows, over all choices; None where it sets no bound."""
    head = job.head
    if job.endpoint == "completions":
        per_choice: int | None = head.max_tokens or COMPLETION_MAX_TOKENS
    else:
        per_choice = head.max_completion_tokens or head.max_tokens
    if per_choice is None:
        return None
    # Engines of other make check these values themselves, later: here none may be below 1.
    return max(1, per_choice) * max(1, head.n or 1) * max(1, len(prepared.prompts))


def _run_so_far(job: Job, status: int) -> RealisedUsage:
    """Tell what had run of a job whose replica never said; nothing if no replica began it.

    A client that leaves during its own prefill pays for it; a replica's failure is not charged.
    """
    place = job.served or job.placed
    prepared = job.prepared
    began = job.first_token_at is not None or status == CLIENT_GONE
    if prepared is None or place is None or not began:
        return RealisedUsage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    return RealisedUsage(
        prompt_tokens=prepared.num_prompt_tokens,
        completion_tokens=max(job.transcript.num_tokens, job.num_output_chunks),
        cached_tokens=min(place.winner.num_cached_tokens, prepared.num_prompt_tokens),
    )


def _watch_budgets(job: Job, claim: Claim, verdict: Verdict, metrics: GatewayMetrics) -> None:
    """Show how far budgets are used; the claim that passes a soft limit is logged, fleet-wide."""
    for scope, use in zip(claim.scopes, verdict.uses, strict=True):
        for words, limit, used in budgets_of(scope, use):
            if scope.name.startswith("tenant/"):
                metrics.budget_used_of(job.tenant.name, words.split()[-1]).value = used / limit
            soft = scope.limits.soft_limit * limit
            if used - claim.num_tokens < soft <= used:
                log.warning(
                    "soft limit passed tenant=%s key=%s budget=%r used=%d limit=%d",
                    job.tenant.name,
                    job.key_alias or "-",
                    words,
                    used,
                    limit,
                )
