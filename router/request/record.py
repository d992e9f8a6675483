"""What a recording keeps of one finished job."""

from __future__ import annotations

from router.observe.recorder import Outcome, Recorded
from router.request.claim import CLIENT_GONE
from router.request.job import Job

_REFUSED = frozenset({429, 503})


def recorded(job: Job, *, status: int) -> Recorded | None:
    """Describe a job for the recorder; None when its prompt was never understood."""
    prepared = job.prepared
    if prepared is None:
        return None
    return Recorded(
        arrived_at=job.started_at,
        prompts=prepared.prompts,
        num_prompt_tokens=prepared.num_prompt_tokens,
        num_output_tokens=job.num_output_tokens,
        block_size=job.block_size,
        tenant=job.tenant.name,
        model=job.head.model,
        priority=job.priority,
        group=job.tenant.isolation_group,
        client_salt=job.head.cache_salt,
        session=job.session,
        outcome=_outcome(job, status),
    )


def _outcome(job: Job, status: int) -> Outcome:
    if status == CLIENT_GONE:
        return "cancelled"
    if status < 300:
        return "answered"
    return "refused" if status in _REFUSED and job.first_token_at is None else "failed"
