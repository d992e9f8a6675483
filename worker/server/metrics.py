"""A replica's metrics in Prometheus text: vLLM's names with vLLM's meaning, and our own.

Engine figures are read from its newest statistics at each scrape, so nothing is counted twice;
what only the front sees (latencies, finish reasons) is counted here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.messages import EngineStats, TenantStats
from engine.residency import AGE_BUCKETS_S, AgeCounts, BlockAges
from kvindex.ingest_state import IngestCounters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_ENGINE = "0"
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5)
_LONG_BUCKETS_S = (5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_E2E_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_E2E_LONG_BUCKETS_S = (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)

FINISHED_REASONS = ("stop", "length", "abort", "error")


class FrontMetrics:
    """The metrics of one replica; `render` makes the scrape."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            _LABELS,
            buckets=(*_TTFT_BUCKETS_S, *_LONG_BUCKETS_S),
            registry=self._registry,
        ).labels(model, _ENGINE)
        self._e2e_latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its end.",
            _LABELS,
            buckets=(*_E2E_BUCKETS_S, *_E2E_LONG_BUCKETS_S),
            registry=self._registry,
        ).labels(model, _ENGINE)
        success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._finished = {
            reason: success.labels(model, _ENGINE, reason) for reason in FINISHED_REASONS
        }

    def observe_first_token(self, elapsed_s: float) -> None:
        """Count the time to a request's first token."""
        self._time_to_first_token.observe(elapsed_s)

    def observe_end(self, elapsed_s: float) -> None:
        """Count the duration of a request that was answered whole."""
        self._e2e_latency.observe(elapsed_s)

    def count_finished(self, reason: str) -> None:
        """Count the end of one choice; `reason` is one of FINISHED_REASONS."""
        self._finished[reason].inc()

    def render(
        self,
        stats: Sequence[EngineStats],
        tenants: Mapping[str, TenantStats],
        *,
        mode: str,
        num_active: int,
        ingest: Mapping[int, IngestCounters],
    ) -> bytes:
        """Return the scrape; `stats` are those of every engine core by rank, empty without any.

        `tenants` are summed over all cores; "" stands for requests without a tenant. `ingest`: what
        happened to the KV events of each core on their way into the fleet's index.
        """
        registry = CollectorRegistry()
        registry.register(_TenantCollector(self._model, tenants))
        registry.register(_EngineCollector(self._model, stats))
        registry.register(_FrontCollector(self._model, mode, num_active))
        registry.register(_IngestCollector(self._model, ingest))
        return generate_latest(self._registry) + generate_latest(registry)


class _Figure(NamedTuple):
    """One engine metric and how it is read from statistics."""

    name: str
    documentation: str
    read: Callable[[EngineStats], float]


def _kv_usage(stats: EngineStats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


_GAUGES = (
    _Figure("vllm:engine_sleep_state", "0 awake, 1 or 2 asleep.", lambda s: s.sleep_level or 0),
    _Figure("vllm:num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    _Figure("vllm:num_requests_waiting", "Requests that wait.", lambda s: s.num_waiting),
    _Figure(
        "prefixfleet_engine_preempted_requests",
        "Waiting requests that have run before.",
        lambda s: s.num_preempted,
    ),
    _Figure("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", _kv_usage),
    _Figure("prefixfleet_engine_kv_blocks", "KV blocks in all.", lambda s: s.num_blocks),
    _Figure(
        "prefixfleet_engine_cached_blocks", "Blocks a look-up finds.", lambda s: s.num_cached_blocks
    ),
    _Figure("prefixfleet_engine_host_blocks", "Host blocks in all.", lambda s: s.num_host_blocks),
    _Figure(
        "prefixfleet_engine_host_cached_blocks",
        "Blocks a look-up finds in the host tier.",
        lambda s: s.num_host_cached_blocks,
    ),
    _Figure(
        "prefixfleet_engine_queued_prefill_tokens",
        "Prompt tokens of admitted and waiting requests not computed yet.",
        lambda s: s.queued_prefill_tokens,
    ),
    _Figure(
        "prefixfleet_engine_prefill_tokens_per_second",
        "Measured prefill rate.",
        lambda s: s.prefill_tokens_per_s,
    ),
    _Figure(
        "prefixfleet_engine_decode_tokens_per_second",
        "Measured decode rate.",
        lambda s: s.decode_tokens_per_s,
    ),
)
_COUNTERS = (
    _Figure("vllm:prefix_cache_queries", "Tokens looked up.", lambda s: s.prefix_queries_total),
    _Figure("vllm:prefix_cache_hits", "Tokens found in the cache.", lambda s: s.prefix_hits_total),
    _Figure("vllm:prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens_total),
    _Figure("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens_total),
    _Figure("vllm:num_preemptions", "Preemptions.", lambda s: s.preemptions_total),
    _Figure(
        "prefixfleet_engine_padding_tokens",
        "Tokens computed for nobody, to fill a shape up.",
        lambda s: s.padding_tokens_total,
    ),
    _Figure("prefixfleet_engine_evictions", "Cached blocks evicted.", lambda s: s.evictions_total),
    _Figure(
        "prefixfleet_engine_resyncs",
        "Times that the runner had lost its place or its memory.",
        lambda s: s.resyncs_total,
    ),
    _Figure(
        "prefixfleet_engine_host_stores", "Blocks moved to host.", lambda s: s.host_stores_total
    ),
    _Figure("prefixfleet_engine_host_loads", "Blocks brought back.", lambda s: s.host_loads_total),
    _Figure(
        "vllm:spec_decode_num_drafts", "Rows of guesses verified.", lambda s: s.spec_drafts_total
    ),
    _Figure(
        "vllm:spec_decode_num_draft_tokens",
        "Guesses verified.",
        lambda s: s.spec_draft_tokens_total,
    ),
    _Figure(
        "vllm:spec_decode_num_accepted_tokens",
        "Guesses that became output.",
        lambda s: s.spec_accepted_tokens_total,
    ),
    _Figure("prefixfleet_engine_busy_seconds", "Seconds spent in steps.", lambda s: s.busy_s_total),
)


_AGES: tuple[tuple[str, str, Callable[[BlockAges], AgeCounts]], ...] = (
    ("vllm:kv_block_lifetime_seconds", "Commit to eviction, sampled.", lambda a: a.lifetime),
    ("vllm:kv_block_idle_before_evict_seconds", "Last use to eviction, sampled.", lambda a: a.idle),
    ("vllm:kv_block_reuse_gap_seconds", "One use to the next, sampled.", lambda a: a.reuse_gap),
)


def _buckets(ages: AgeCounts) -> list[tuple[str, float]]:
    """Return (upper bound, cumulative count) of a histogram, as Prometheus wants it."""
    bounds = [*map(str, AGE_BUCKETS_S), "+Inf"]
    return list(zip(bounds, itertools.accumulate(ages.counts), strict=True))


class _EngineCollector:
    """One moment's statistics of every engine core as metric families."""

    def __init__(self, model: str, stats: Sequence[EngineStats]) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        if not self._stats:
            return
        for figure in _GAUGES:
            yield self._filled(GaugeMetricFamily(*figure[:2], labels=_LABELS), figure)
        for figure in _COUNTERS:
            yield self._filled(CounterMetricFamily(*figure[:2], labels=_LABELS), figure)
        for name, documentation, read in _AGES:
            family = HistogramMetricFamily(name, documentation, labels=_LABELS)
            for rank, stats in enumerate(self._stats):
                ages = read(stats.block_ages)
                family.add_metric((self._model, str(rank)), _buckets(ages), ages.total_s)
            yield family
        yield self._accepted_by_place()

    def _accepted_by_place(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guesses that became output, by their place in the row.",
            labels=(*_LABELS, "position"),
        )
        for rank, stats in enumerate(self._stats):
            for place, count in enumerate(stats.spec_accepted_at_total):
                family.add_metric((self._model, str(rank), str(place)), count)
        return family

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, figure: _Figure
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for rank, stats in enumerate(self._stats):
            family.add_metric((self._model, str(rank)), figure.read(stats))
        return family


class _TenantFigure(NamedTuple):
    """One figure per tenant; `total` tells counters from gauges."""

    name: str
    documentation: str
    read: Callable[[TenantStats], float]
    total: bool = True


_TENANT_FIGURES = (
    _TenantFigure(
        "prefixfleet_engine_tenant_prefix_queries",
        "Tokens looked up.",
        lambda s: s.prefix_queries_total,
    ),
    _TenantFigure(
        "prefixfleet_engine_tenant_prefix_hits",
        "Tokens found in the cache.",
        lambda s: s.prefix_hits_total,
    ),
    _TenantFigure(
        "prefixfleet_engine_tenant_prompt_tokens",
        "Prompt tokens processed.",
        lambda s: s.prompt_tokens_total,
    ),
    _TenantFigure(
        "prefixfleet_engine_tenant_generation_tokens",
        "Tokens generated.",
        lambda s: s.generation_tokens_total,
    ),
    _TenantFigure(
        "prefixfleet_engine_tenant_preemptions", "Preemptions.", lambda s: s.preemptions_total
    ),
    _TenantFigure(
        "prefixfleet_engine_tenant_evictions",
        "Cached blocks evicted that it had computed.",
        lambda s: s.evictions_total,
    ),
    _TenantFigure(
        "prefixfleet_engine_tenant_held_blocks",
        "KV blocks of running requests.",
        lambda s: s.num_held_blocks,
        total=False,
    ),
)


class _TenantCollector:
    """One moment's statistics of every tenant as metric families."""

    def __init__(self, model: str, tenants: Mapping[str, TenantStats]) -> None:
        self._model = model
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        for figure in _TENANT_FIGURES if self._tenants else ():
            kind = CounterMetricFamily if figure.total else GaugeMetricFamily
            family = kind(figure.name, figure.documentation, labels=("model_name", "tenant"))
            for tenant, stats in self._tenants.items():
                family.add_metric((self._model, tenant), figure.read(stats))
            yield family


class _FrontCollector:
    """The front's own gauges."""

    def __init__(self, model: str, mode: str, num_active: int) -> None:
        self._model = model
        self._mode = mode
        self._num_active = num_active

    def collect(self) -> Iterable[Metric]:
        active = GaugeMetricFamily(
            "prefixfleet_engine_active_generations", "Requests in flight.", labels=("model_name",)
        )
        active.add_metric((self._model,), self._num_active)
        mode = GaugeMetricFamily(
            "prefixfleet_engine_index_mode",
            "1 for the trust mode of this replica in the index.",
            labels=("model_name", "mode"),
        )
        mode.add_metric((self._model, self._mode), 1)
        return (active, mode)


class _IngestCollector:
    """The way of the KV events into the index: `event` gaps, snapshots and the like."""

    def __init__(self, model: str, ingest: Mapping[int, IngestCounters]) -> None:
        self._model = model
        self._ingest = ingest

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "prefixfleet_engine_ingest",
            "What happened to KV events on their way into the index.",
            labels=(*_LABELS, "event"),
        )
        for rank, counters in self._ingest.items():
            for name, number in asdict(counters).items():
                event = name.removeprefix("num_")
                family.add_metric((self._model, str(rank), event), number)
        return (family,)
