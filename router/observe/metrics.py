"""The gateway's metrics, `prefixfleet_*`, in one registry per gateway.

Labels are model, tenant, policy, mode and replica; never a key or a request. It measures nothing
itself: others tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvindex.index import TRUST_MODES, TrustMode
from router.policy.types import BreakerState

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_INDEX_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_BREAKER_STATES: tuple[BreakerState, ...] = ("closed", "open", "half_open")


@dataclass(frozen=True, slots=True)
class Timings:
    """What is measured of every request, under the labels of one model and tenant."""

    ttft: Histogram
    duration: Histogram


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What is counted of every request whose usage is known, under the same labels."""

    prompt_tokens: Counter
    completion_tokens: Counter
    predicted: Counter
    realised: Counter
    available: Counter


@dataclass(slots=True)
class Level:
    """What a gauge shows when it is scraped."""

    value: float = 0.0


class GatewayMetrics:
    """Every metric of a gateway as an attribute.

    `*_of` find what is measured of every request, by its labels.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._shown_replicas: set[str] = set()
        of = ["model", "tenant"]
        self._add_requests(of)
        self._add_attempts()
        self._add_tenancy(of)
        self._add_state()
        # To find a series by its labels takes as long as to count three times.
        self.requests_of = cache(self.requests.labels)
        self.causes_of = cache(self.causes.labels)
        self.charged_tokens_of = cache(self.charged_tokens.labels)
        self.index_call_of = cache(self.index_call.labels)
        self.budget_used_of = cache(self._budget_used)
        self.timings_of = cache(self._timings)
        self.tokens_of = cache(self._tokens)
        self.prompts_of = cache(self._prompts)

    def _add_requests(self, of: list[str]) -> None:
        """What every request comes to."""
        self.requests = self._counter(
            "requests", "Requests by their end; 499: gone client", [*of, "policy", "status"]
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first output", of, _TTFT_BUCKETS
        )
        self.duration = self._histogram(
            "request_duration_seconds", "Arrival to end", of, _E2E_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "As replicas reported", of)
        self.completion_tokens = self._counter("completion_tokens", "As replicas reported", of)
        self.predicted = self._counter(
            "predicted_cached_tokens", "Cached prompt tokens the gateway expected", of
        )
        self.realised = self._counter(
            "realised_cached_tokens", "Cached prompt tokens replicas reported", of
        )
        self.available = self._counter(
            "available_cached_tokens", "Cached prompt tokens where most of the prompt was held", of
        )
        self.replica_prompt_tokens = self._counter(
            "replica_prompt_tokens", "Prompt tokens served, as the replica reported", ["replica"]
        )
        self.replica_cached_tokens = self._counter(
            "replica_cached_tokens", "Of those, the cached ones", ["replica"]
        )
        self.causes = self._counter(
            "prediction_causes",
            "Requests by why the realised hit was another than predicted; none: it was not",
            [*of, "cause"],
        )

    def _add_attempts(self) -> None:
        """What goes wrong at replicas, and what is done about it."""
        self.retries = self._counter(
            "retries", "Attempts after a failed one, by its cause", ["replica", "cause"]
        )
        self.retries_denied = self._counter(
            "retries_denied", "Retries that were not made: the budget was spent", []
        )
        self.resumes = self._counter(
            "resumed_requests",
            "Answers gone on with in mid-stream, by the new replica",
            ["replica"],
        )
        self.quarantined = self._counter(
            "quarantined_requests", "Requests that two replicas died of", []
        )
        self.refused = self._counter(
            "refused_replicas", "Registrations that did not fit their pool", ["replica"]
        )

    def _add_tenancy(self, of: list[str]) -> None:
        """Limits, charges, and the store and configuration that they come from."""
        self.limit_hits = self._counter(
            "limit_hits", "Requests refused by a limit of their tenant or key", ["tenant", "limit"]
        )
        self.charged_tokens = self._counter(
            "charged_tokens", "Uncached + 0.1 cached + output tokens, as tenants are charged", of
        )
        self.budget_used = self._gauge(
            "budget_used_ratio", "Share of a tenant's budget that is used", ["tenant", "period"]
        )
        self.limits_shared = self._gauge(
            "limits_shared", "1 while limits are fleet-wide, 0 while each gateway has its share", []
        )
        self.unsettled = self._gauge(
            "unsettled_requests", "Settlements that wait for the state store", []
        )
        self.directory_restored = self._gauge(
            "directory_restored", "Times that this gateway filled an emptied state store", []
        )
        self.config_reloads = self._counter(
            "config_reloads", "Attempts to read the configuration again", ["result"]
        )

    def _add_state(self) -> None:
        """This gateway now, the index, and each replica."""
        self.in_flight = self._gauge("requests_in_flight", "Requests inside this gateway", [])
        self.certificate_expires = self._gauge(
            "tls_certificate_expires_timestamp_seconds",
            "End of the certificate that is served, in Unix time",
            ["file"],
        )
        self.index_up = self._gauge("index_up", "1 while the prefix index answers", [])
        self.index_call = self._histogram(
            "index_call_seconds", "Answered calls to the index", ["call"], _INDEX_BUCKETS
        )
        self.replica_mode = self._gauge(
            "replica_mode", "1 for the current mode of a live replica", ["replica", "mode"]
        )
        self.replica_active = self._gauge(
            "replica_requests", "Requests of this gateway at a replica", ["replica"]
        )
        self.breaker = self._gauge(
            "breaker_state", "1 for the current state of a replica's breaker", ["replica", "state"]
        )

    def _timings(self, model: str, tenant: str) -> Timings:
        return Timings(
            ttft=self.ttft.labels(model, tenant), duration=self.duration.labels(model, tenant)
        )

    def _tokens(self, model: str, tenant: str) -> TokenCounts:
        return TokenCounts(
            prompt_tokens=self.prompt_tokens.labels(model, tenant),
            completion_tokens=self.completion_tokens.labels(model, tenant),
            predicted=self.predicted.labels(model, tenant),
            realised=self.realised.labels(model, tenant),
            available=self.available.labels(model, tenant),
        )

    def _prompts(self, replica: str) -> tuple[Counter, Counter]:
        """Return the prompt tokens of one replica, all and cached."""
        return (
            self.replica_prompt_tokens.labels(replica),
            self.replica_cached_tokens.labels(replica),
        )

    def _budget_used(self, tenant: str, period: str) -> Level:
        level = Level()
        self.budget_used.labels(tenant, period).set_function(lambda: level.value)
        return level

    def follow_certificate(self, file: str, expires_at: Callable[[], float]) -> None:
        """Export the end of the certificate in a file, in Unix seconds, as it is at each scrape."""
        self.certificate_expires.labels(file).set_function(expires_at)

    def keep_replicas(self, replicas: Collection[str]) -> None:
        """Forget the gauges of all other replicas."""
        for gone in self._shown_replicas.difference(replicas):
            for mode in TRUST_MODES:
                self.replica_mode.remove(gone, mode)
            for state in _BREAKER_STATES:
                self.breaker.remove(gone, state)
            self.replica_active.remove(gone)
        self._shown_replicas.intersection_update(replicas)

    def set_replica(
        self, replica: str, *, mode: TrustMode | None, num_active: int, breaker: BreakerState
    ) -> None:
        """Describe one replica; `mode` None while it is not live."""
        self._shown_replicas.add(replica)
        for one in TRUST_MODES:
            self.replica_mode.labels(replica, one).set(1 if one == mode else 0)
        for state in _BREAKER_STATES:
            self.breaker.labels(replica, state).set(1 if state == breaker else 0)
        self.replica_active.labels(replica).set(num_active)

    def observe_index_call(self, call: str, seconds: float) -> None:
        """Note the latency of an answered index call."""
        self.index_call_of(call).observe(seconds)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format; O(series), not for an event loop."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"prefixfleet_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"prefixfleet_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: list[str], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(
            f"prefixfleet_{name}", text, labels, buckets=buckets, registry=self.registry
        )
