"""Statistics of several engine cores as one; arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from engine.messages import EngineStats, TenantStats
from engine.residency import BlockAges


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Add up the statistics of several cores, rates included; paused or asleep is what all are."""
    apart = ("pause_mode", "sleep_level", "block_ages", "spec_accepted_at_total")
    names = [name for name in EngineStats.__struct_fields__ if name not in apart]
    modes = {one.pause_mode for one in stats}
    levels = {one.sleep_level for one in stats}
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in names},
        spec_accepted_at_total=[
            sum(place)
            for place in zip_longest(*(s.spec_accepted_at_total for s in stats), fillvalue=0)
        ],
        block_ages=BlockAges.sum(one.block_ages for one in stats),
        pause_mode=modes.pop() if len(modes) == 1 else None,
        sleep_level=levels.pop() if len(levels) == 1 else None,
    )


def sum_tenant_stats(stats: Sequence[TenantStats]) -> TenantStats:
    """Add up one tenant's statistics of several cores."""
    names = TenantStats.__struct_fields__
    return TenantStats(**{name: sum(getattr(one, name) for one in stats) for name in names})
