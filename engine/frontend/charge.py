"""What a request costs its tenant, in tokens: one function for limits, budgets and fair order.

It knows no prices and no tenants.
"""

from __future__ import annotations

CACHED_TOKEN_COST = 0.1
"""A cached prompt token costs this share of a computed one: it takes memory, not arithmetic."""


def charge(*, num_uncached_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> float:
    """Return the cost in computed tokens: uncached + 0.1 * cached + output."""
    return num_uncached_tokens + CACHED_TOKEN_COST * num_cached_tokens + num_output_tokens
