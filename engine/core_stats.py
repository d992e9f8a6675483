"""What an engine says of itself in numbers: its counters and gauges at one moment.

It only reads; the counting is done where things happen.
"""

from __future__ import annotations

from collections import Counter

from engine.messages import EngineStats, SleepLevel, TenantStats
from engine.resync import Resync
from engine.scheduler import Scheduler
from engine.stats import StepRates


def engine_stats(
    scheduler: Scheduler,
    *,
    rates: StepRates,
    resync: Resync,
    num_steps: int,
    sleep_level: SleepLevel | None,
) -> EngineStats:
    """Return counters and gauges as of now; O(live requests)."""
    pool, counters = scheduler.pool, scheduler.counters
    host = pool.host
    return EngineStats(
        step=num_steps,
        block_ages=pool.residency.ages,
        pause_mode=scheduler.pause_mode,
        sleep_level=sleep_level,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_preempted=scheduler.num_preempted,
        queued_prefill_tokens=scheduler.queued_prefill_tokens,
        num_blocks=pool.num_usable,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached_hashes,
        prefix_queries_total=counters.prefix_queries,
        prefix_hits_total=counters.prefix_hits,
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        padding_tokens_total=counters.padding_tokens,
        preemptions_total=counters.preemptions,
        evictions_total=pool.evictions.total,
        num_host_blocks=len(host.blocks) if host else 0,
        num_host_cached_blocks=host.map.num_hashes if host else 0,
        host_stores_total=host.num_stored if host else 0,
        host_loads_total=host.num_loaded if host else 0,
        resyncs_total=resync.num_total,
        spec_drafts_total=counters.speculation.num_drafts,
        spec_draft_tokens_total=counters.speculation.num_tokens,
        spec_accepted_tokens_total=counters.speculation.num_accepted,
        spec_accepted_at_total=list(counters.speculation.accepted_at),
        busy_s_total=rates.busy_s,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
    )


def tenant_stats(scheduler: Scheduler) -> dict[str, TenantStats]:
    """Return the share of each tenant, "" for requests without one; O(blocks in use)."""
    held: Counter[str] = Counter()
    for request in scheduler.running:
        table = scheduler.kv_cache.tables[request.request_id]
        held[request.source.tenant or ""] += table.num_held
    evictions = scheduler.pool.evictions
    return {
        tenant or "": TenantStats(
            prefix_queries_total=account.prefix_queries,
            prefix_hits_total=account.prefix_hits,
            prompt_tokens_total=account.prompt_tokens,
            generation_tokens_total=account.generation_tokens,
            preemptions_total=account.preemptions,
            evictions_total=evictions.of(tenant),
            num_held_blocks=held[tenant or ""],
        )
        for tenant, account in scheduler.counters.tenants.items()
    }
