"""Commits of blocks that are completed by a token which was unknown when the step was planned."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.step_plan import InFlightStep


def queue_late_commits(
    request: Request, in_flight: Iterable[InFlightStep], kv_cache: KVCacheManager
) -> None:
    """Note the block, if any, that the oldest step in flight completes with the newest token."""
    if request.num_tokens % kv_cache.pool.block_size:
        return
    for step, _ in in_flight:
        num_scheduled = step.num_scheduled_tokens.get(request.request_id)
        if num_scheduled is not None:
            end = step.num_computed_tokens[request.request_id] + num_scheduled
            kv_cache.queue_commits(request, step.step, num_computed_tokens=end)
            return
