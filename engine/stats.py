"""What an engine counts: plain totals, and rates measured from its own steps.

It knows no exporter; worker/server/metrics turns `EngineStats` into Prometheus text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.spec_decode.acceptance import Acceptance

_SMOOTHING = 0.2
_MIN_PREFILL_TOKENS = 32
_MAX_TENANTS = 1000


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; all in tokens but `preemptions`. They only grow."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class EngineCounters(Counters):
    """Totals over all requests, and the same by tenant; guesses over all requests only.

    `padding_tokens`: computed for nobody, to fill a shape up; they belong to no tenant.
    Tenants beyond the first 1,000 share one account, named None like that of requests without
    any: what a client can invent must not fill the memory.
    """

    padding_tokens: int = 0
    tenants: dict[str | None, Counters] = field(default_factory=dict)
    speculation: Acceptance = field(default_factory=Acceptance)

    def account(self, tenant: str | None) -> Counters:
        """Return the totals of a tenant."""
        found = self.tenants.get(tenant)
        if found is None:
            name = tenant if len(self.tenants) < _MAX_TENANTS else None
            found = self.tenants.setdefault(name, Counters())
        return found


@dataclass(slots=True)
class Evictions:
    """Evicted blocks in all, and by the tenant that had them computed; they only grow.

    As with accounts, tenants beyond the first 1,000 count as None.
    """

    total: int = 0
    _by_tenant: dict[str | None, int] = field(default_factory=dict)

    def count(self, tenants: Sequence[str | None]) -> None:
        """Count one block for each of the tenants, which are few: O(blocks * tenants)."""
        for tenant in dict.fromkeys(tenants):
            count = tenants.count(tenant)
            self.total += count
            known = tenant in self._by_tenant or len(self._by_tenant) < _MAX_TENANTS
            name = tenant if known else None
            self._by_tenant[name] = self._by_tenant.get(name, 0) + count

    def of(self, tenant: str | None) -> int:
        """Return the evicted blocks of a tenant."""
        return self._by_tenant.get(tenant, 0)


@dataclass(slots=True)
class StepRates:
    """Smoothed speed of this engine, tokens per second; 0 until something was measured.

    Exponential average with weight 0.2. A step counts for prefill when it computes at least 32
    prompt tokens, for decode when it computes nothing else.
    """

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    busy_s: float = 0.0

    def observe(self, *, num_prefill_tokens: int, num_decode_tokens: int, step_s: float) -> None:
        """Take in one executed step."""
        self.busy_s += step_s
        if step_s <= 0:
            return
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS:
            rate = (num_prefill_tokens + num_decode_tokens) / step_s
            self.prefill_tokens_per_s = blend(self.prefill_tokens_per_s, rate)
        elif num_decode_tokens and not num_prefill_tokens:
            rate = num_decode_tokens / step_s
            self.decode_tokens_per_s = blend(self.decode_tokens_per_s, rate)

    def tokens_within(self, step_s: float) -> int | None:
        """Return how many tokens a step of `step_s` seconds may compute, None for any number.

        Never fewer than 32, so that prefill always advances; no more while nothing was measured:
        on a slow machine a longer step would look like a core that hangs.
        """
        if step_s <= 0:
            return None
        return max(_MIN_PREFILL_TOKENS, int(self.prefill_tokens_per_s * step_s))


def blend(old: float, new: float) -> float:
    """Return a smoothed speed after one more measurement; 0 stands for none before."""
    return new if old == 0 else old + _SMOOTHING * (new - old)
