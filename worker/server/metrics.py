"""A replica's metrics in Prometheus text: vLLM's names with vLLM's meaning, and our own.

Engine figures are read from its newest statistics at each scrape, so nothing is counted twice;
what only the front sees (latencies, finish reasons) is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.messages import EngineStats

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

    def render(self, stats: EngineStats | None, *, mode: str, num_active: int) -> bytes:
        """Return the scrape; engine figures are left out while there is no engine."""
        registry = CollectorRegistry()
        if stats is not None:
            registry.register(_EngineCollector(self._model, stats))
        registry.register(_FrontCollector(self._model, mode, num_active))
        return generate_latest(self._registry) + generate_latest(registry)


class _EngineCollector:
    """One moment's engine statistics as metric families."""

    def __init__(self, model: str, stats: EngineStats) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        usage = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", usage),
            ("prefixfleet_engine_kv_blocks", "KV blocks in all.", stats.num_blocks),
            (
                "prefixfleet_engine_cached_blocks",
                "Blocks a look-up finds.",
                stats.num_cached_blocks,
            ),
            (
                "prefixfleet_engine_queued_prefill_tokens",
                "Prompt tokens of admitted and waiting requests not computed yet.",
                stats.queued_prefill_tokens,
            ),
            (
                "prefixfleet_engine_prefill_tokens_per_second",
                "Measured prefill rate.",
                stats.prefill_tokens_per_s,
            ),
            (
                "prefixfleet_engine_decode_tokens_per_second",
                "Measured decode rate.",
                stats.decode_tokens_per_s,
            ),
        )
        for name, documentation, value in gauges:
            gauge = GaugeMetricFamily(name, documentation, labels=_LABELS)
            gauge.add_metric((self._model, _ENGINE), value)
            yield gauge
        yield from self._counters()

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        counters = (
            ("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_queries_total),
            ("vllm:prefix_cache_hits", "Tokens found in the cache.", stats.prefix_hits_total),
            ("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens_total),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("vllm:num_preemptions", "Preemptions.", stats.preemptions_total),
            ("prefixfleet_engine_evictions", "Cached blocks evicted.", stats.evictions_total),
            ("prefixfleet_engine_busy_seconds", "Seconds spent in steps.", stats.busy_s_total),
        )
        for name, documentation, value in counters:
            counter = CounterMetricFamily(name, documentation, labels=_LABELS)
            counter.add_metric((self._model, _ENGINE), value)
            yield counter


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
