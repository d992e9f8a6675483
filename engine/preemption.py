"""Who gives its blocks back when they run out.

A pure choice; what a preemption does is in scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.request import Request


def choose_victim(running: Sequence[Request], cursor: int, config: EngineConfig) -> Request | None:
    """Return the running request that loses least work, of those not planned in this step.

    `running` is in order of importance, planned up to `cursor`. Never the most important one, nor
    one that holds all its blocks; under `priority` only of the least urgent level. None when there
    is none: then those that have blocks go on.
    """
    candidates = [
        r for r in running[max(cursor, 1) :] if r.num_preemptions < config.max_preemptions
    ]
    if config.policy == "priority" and candidates:
        lowest = max(request.source.priority for request in candidates)
        candidates = [r for r in candidates if r.source.priority == lowest]
    return min(candidates, key=lambda r: (r.num_computed_tokens, -r.arrival), default=None)
