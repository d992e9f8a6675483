"""What the first admission of a request counts as, for totals and for its tenant's turn."""

from __future__ import annotations

from engine.frontend.charge import charge
from engine.request import Request
from engine.stats import EngineCounters


def count_admission(request: Request, counters: EngineCounters) -> float:
    """Count prompt and hit of a first admission; return what its tenant is charged for them."""
    num_prompt = request.num_prompt_tokens
    num_cached = request.num_cached_tokens = min(request.num_computed_tokens, num_prompt)
    for totals in (counters, request.account):
        totals.prefix_queries += num_prompt
        totals.prefix_hits += num_cached
        totals.prompt_tokens += num_prompt
    return charge(
        num_uncached_tokens=num_prompt - num_cached,
        num_cached_tokens=num_cached,
        num_output_tokens=0,
    )
