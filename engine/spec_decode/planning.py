"""How a step takes drafts in, and what is true of a request once they have been verified.

Drafts come last: they take neither tokens nor blocks that another running request may need in the
same step, so nobody waits and nobody is preempted for a guess.
"""

from __future__ import annotations

from engine.kv_cache_manager import KVCacheManager
from engine.output import ModelRunnerOutput, SchedulerOutput
from engine.request import Request, RequestStatus
from engine.spec_decode.acceptance import Acceptance
from engine.step_plan import StepPlan


def plan_drafts(
    plan: StepPlan, request: Request, kv_cache: KVCacheManager, *, num_behind: int
) -> None:
    """Add the drafts that fit to a plan in which the request reaches its last known token.

    `num_behind` running requests are yet to be planned, each with one token at least. The request
    forgets the drafts that do not fit.
    """
    num_computed = request.num_computed_tokens
    num_drafts = min(
        len(request.draft_token_ids),
        plan.budget - num_behind,
        request.max_num_tokens - request.num_tokens - 1,
    )
    if num_computed + num_drafts > kv_cache.capacity(request):
        most_wanted = plan.budget // kv_cache.pool.block_size + num_behind
        spare = most_wanted * len(kv_cache.groups) if num_behind else 0
        new_blocks = kv_cache.extend(request, num_computed + num_drafts, spare_blocks=spare)
        if new_blocks is None:
            num_drafts = kv_cache.capacity(request) - num_computed
        elif new_blocks:
            plan.add_blocks(request, new_blocks)
    request.draft_token_ids = request.draft_token_ids[: max(num_drafts, 0)]
    if request.draft_token_ids:
        plan.add_drafts(request)


def confirm_drafts(
    request: Request, step: SchedulerOutput, kv_cache: KVCacheManager, *, num_accepted: int
) -> None:
    """Count the drafts of a step that has returned as computed, as far as the request took them.

    Their blocks become findable at once: the step that wrote them is behind us. What stands behind
    them in the request's blocks is not its text, and is written anew. A request that was preempted
    meanwhile has no blocks.
    """
    if not num_accepted or request.status is not RequestStatus.RUNNING:
        return
    request.num_computed_tokens += num_accepted
    kv_cache.queue_commits(request, step.step, num_computed_tokens=request.num_computed_tokens)
    kv_cache.commit_step(step.step)


def num_wrong_drafts(step: SchedulerOutput, output: ModelRunnerOutput) -> int:
    """Count the tokens that a step computed in vain: drafts that did not become output."""
    sampled = output.sampled_token_ids
    return sum(
        len(drafts) + 1 - len(sampled[request_id])
        for request_id, drafts in step.draft_token_ids.items()
        if request_id in sampled
    )


def count_drafts(
    request: Request, step: SchedulerOutput, acceptance: Acceptance, *, num_right: int
) -> None:
    """Count the drafts that a step has verified, for the request and for all."""
    num_drafted = len(step.draft_token_ids[request.request_id])
    request.num_drafted += num_drafted
    request.num_accepted += num_right
    acceptance.observe(num_drafted=num_drafted, num_accepted=num_right)
