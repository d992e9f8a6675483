"""Statistics of several engine cores as one; arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import EngineStats, TenantStats
from engine.residency import BlockAges


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Add up the statistics of several cores, rates included; paused is what all are."""
    names = [n for n in EngineStats.__struct_fields__ if n not in ("pause_mode", "block_ages")]
    modes = {one.pause_mode for one in stats}
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in names},
        block_ages=BlockAges.sum(one.block_ages for one in stats),
        pause_mode=modes.pop() if len(modes) == 1 else None,
    )


def sum_tenant_stats(stats: Sequence[TenantStats]) -> TenantStats:
    """Add up one tenant's statistics of several cores."""
    names = TenantStats.__struct_fields__
    return TenantStats(**{name: sum(getattr(one, name) for one in stats) for name in names})
