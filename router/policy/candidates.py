"""From a target's view and this gateway's own account of it to a candidate: one unit, seconds.

Pure arithmetic; which candidates are let through, and which one wins, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.ledger import Account
from router.policy.types import Candidate, PlanRequest, TargetView

HOST_TOKEN_COST = 0.1
"""What bringing a token back from host memory costs, as a share of computing it."""

USABLE_KV = 0.9
"""The share of a KV cache that running requests fill before it evicts what waiting ones had."""


RATE_NOISE = 5.0
"""Prefill rates that differ by less say more of the last prompts' sizes than of the targets."""


def comparable_rates(views: Sequence[TargetView], default: float) -> list[float]:
    """Return the prefill rate of each target, `default` where none was measured.

    What was never measured counts as the fastest, like everyone who is not clearly slower:
    anything else would make some of them look better than others that are just the same.
    """
    rates = [view.prefill_tokens_per_s or 0.0 for view in views]
    fastest = (max(rates) if rates else 0.0) or default
    return [rate if rate and rate * RATE_NOISE < fastest else fastest for rate in rates]


def make_candidate(
    request: PlanRequest,
    view: TargetView,
    account: Account,
    *,
    prefill_rate: float,
    num_shared_tokens: int,
    spared: bool,
    max_siblings: int | None,
) -> Candidate:
    """Work out what serving a request at a target would cost; no guard has judged it yet."""
    matched, granularity, hashes = view.matched_blocks, view.hit_granularity, request.hashes
    cached = reusable = predicted_tokens(request, matched, granularity) if matched else 0
    usable, memory_s = matched, 0.0
    lacking = 0.0 if view.kv_tokens is None else _lacking_tokens(request, view, account)
    if lacking:
        memory_s = lacking / (view.kv_tokens or 1) * account.mean_duration_s
        usable = account.num_running_blocks(hashes)
    elif view.pending_blocks or (matched < len(hashes) and hashes[matched] in account.block_refs):
        usable = _usable_blocks(request, view, account, max_siblings)
    if usable != matched:
        reusable = predicted_tokens(request, usable, granularity)
    uncached = request.num_prompt_tokens - reusable
    num_host, to_compute = 0, float(uncached)
    if view.host_blocks:
        on_gpu = predicted_tokens(request, matched - view.host_blocks, granularity)
        num_host = cached - on_gpu
        to_compute += HOST_TOKEN_COST * max(0, min(cached, reusable) - on_gpu)
    queued = account.prefill_tokens + view.reserved_prefill_tokens
    queue_s = queued / prefill_rate
    # NOTE: 15 arguments by name: of more, CPython makes a dictionary, and takes twice as long.
    return Candidate(
        target=view.target,
        mode=view.mode,
        num_cached_tokens=cached,
        num_host_tokens=num_host,
        num_reusable_tokens=reusable,
        num_shared_tokens=num_shared_tokens if num_shared_tokens < reusable else reusable,
        num_uncached_tokens=uncached,
        num_active=account.num_active + view.num_reserved,
        queued_prefill_tokens=queued,
        last_placed=account.last_placed,
        prefill_tokens_per_s=prefill_rate,
        queue_s=queue_s,
        memory_s=memory_s,
        expected_s=queue_s + memory_s + to_compute / prefill_rate,
        spared=spared,
    )


def _lacking_tokens(request: PlanRequest, view: TargetView, account: Account) -> float:
    """Return what a request lacks of a target's KV cache besides all that runs there, in tokens.

    It waits until so much is free. By then what nobody runs has been evicted, its own prefix too.
    What other gateways have reserved counts as far as the target itself says that it is held:
    reservations do not tell how much of them is shared.
    """
    assert view.kv_tokens is not None, "nothing lacks of what is unknown"
    size, room = request.block_size or 0, USABLE_KV * view.kv_tokens
    elsewhere = min(view.num_reserved_blocks * size, view.kv_usage * view.kv_tokens)
    held = account.num_held_tokens + account.num_active * account.mean_output_tokens + elsewhere
    if not held or held + (request.num_prompt_tokens + account.mean_output_tokens) <= room:
        return 0.0
    num_shared = account.num_running_blocks(request.hashes) * size
    own = request.num_prompt_tokens - num_shared + account.mean_output_tokens
    return max(0.0, held + own - room)


def _usable_blocks(
    request: PlanRequest, view: TargetView, account: Account, max_siblings: int | None
) -> int:
    """Count the blocks that it holds, and those that a running sibling is about to write.

    More than `max_siblings` running requests that share them get no such credit.
    """
    running = account.num_running_blocks(request.hashes)
    usable = max(view.matched_blocks + view.pending_blocks, running)
    if max_siblings is None or usable <= view.matched_blocks or not running:
        return usable
    num_siblings = account.block_refs[request.hashes[running - 1]]
    return usable if num_siblings < max_siblings else view.matched_blocks


def predicted_tokens(
    request: PlanRequest, num_blocks: int, hit_granularity: int | None = None
) -> int:
    """Return how many prompt tokens `num_blocks` save: the last one is always computed.

    A hit is a multiple of `hit_granularity` tokens, None for the block size.
    """
    if not num_blocks or request.block_size is None:
        return 0
    unit = hit_granularity or request.block_size
    usable = num_blocks * request.block_size
    if usable >= request.num_prompt_tokens:
        usable = max(0, request.num_prompt_tokens - 1)
    return usable // unit * unit
