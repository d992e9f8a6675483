"""From a target's view and this gateway's own account of it to a candidate: one unit, seconds.

Pure arithmetic; which candidates are let through, and which one wins, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from router.policy.ledger import Account
from router.policy.types import Candidate, Exclusion, PlanRequest, TargetView

HOST_TOKEN_COST = 0.1
"""What bringing a token back from host memory costs, as a share of computing it."""


HOT_REQUESTS = 8
"""A prefix that so many running requests of one target share is hot; a conversation is not."""


class Rates(NamedTuple):
    """Tokens per second."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def usual_rates(views: Sequence[TargetView], default: Rates) -> Rates:
    """Return the rates assumed of a target that was never measured: those of its peers.

    Anything else would make the unmeasured ones look better, or worse, than they are.
    """
    prefill = [v.prefill_tokens_per_s for v in views if v.prefill_tokens_per_s]
    decode = [v.decode_tokens_per_s for v in views if v.decode_tokens_per_s]
    return Rates(
        fmean(prefill) if prefill else default.prefill_tokens_per_s,
        fmean(decode) if decode else default.decode_tokens_per_s,
    )


def queue_of(view: TargetView, account: Account, rates: Rates) -> tuple[int, float]:
    """Return the prefill that waits at a target, in tokens and in seconds."""
    queued = account.prefill_tokens + view.reserved_prefill_tokens
    return queued, queued / (view.prefill_tokens_per_s or rates.prefill_tokens_per_s)


def make_candidate(
    request: PlanRequest,
    view: TargetView,
    account: Account,
    rates: Rates,
    *,
    excluded: Exclusion | None,
    max_siblings: int | None,
) -> Candidate:
    """Work out what serving a request at a target would cost; O(running blocks it shares)."""
    prefill_rate = view.prefill_tokens_per_s or rates.prefill_tokens_per_s
    cached = predicted_tokens(request, view.matched_blocks, view.hit_granularity)
    on_gpu = predicted_tokens(request, view.matched_blocks - view.host_blocks, view.hit_granularity)
    reusable_blocks = _reusable_blocks(request, view, account, max_siblings)
    num_hot = account.num_running_blocks(request.hashes, at_least=HOT_REQUESTS)
    reusable = predicted_tokens(request, reusable_blocks, view.hit_granularity)
    uncached = request.num_prompt_tokens - reusable
    queued, queue_s = queue_of(view, account, rates)
    return Candidate(
        target=view.target,
        mode=view.mode,
        num_cached_tokens=cached,
        num_host_tokens=cached - on_gpu,
        num_reusable_tokens=reusable,
        num_hot_tokens=min(reusable, num_hot * (request.block_size or 0)),
        num_uncached_tokens=uncached,
        num_active=account.num_active + view.num_reserved,
        queued_prefill_tokens=queued,
        last_placed=account.last_placed,
        prefill_tokens_per_s=prefill_rate,
        decode_tokens_per_s=view.decode_tokens_per_s or rates.decode_tokens_per_s,
        queue_s=queue_s,
        expected_s=queue_s + (uncached + HOST_TOKEN_COST * (cached - on_gpu)) / prefill_rate,
        excluded=excluded,
    )


def _reusable_blocks(
    request: PlanRequest, view: TargetView, account: Account, max_siblings: int | None
) -> int:
    """Count the blocks that it holds, and those that a running sibling is about to write.

    More than `max_siblings` running requests that share them get no such credit.
    """
    running = account.num_running_blocks(request.hashes)
    reusable = max(view.matched_blocks + view.pending_blocks, running)
    if max_siblings is None or reusable <= view.matched_blocks or not running:
        return reusable
    num_siblings = account.block_refs[request.hashes[running - 1]]
    return reusable if num_siblings < max_siblings else view.matched_blocks


def predicted_tokens(
    request: PlanRequest, num_blocks: int, hit_granularity: int | None = None
) -> int:
    """Return how many prompt tokens `num_blocks` save: the last one is always computed.

    A hit is a multiple of `hit_granularity` tokens, None for the block size.
    """
    if request.block_size is None:
        return 0
    unit = hit_granularity or request.block_size
    usable = min(num_blocks * request.block_size, request.num_prompt_tokens - 1)
    return max(0, usable // unit * unit)
