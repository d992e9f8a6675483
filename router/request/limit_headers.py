"""What is left of a tenant's limits, in the headers that OpenAI's clients know.

Where tenant and key both have a limit, the one with less left is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.tenancy.limits import Claim, Scope, ScopeUse, Verdict

BUDGET_WARNING = "x-prefixfleet-budget-warning"


class _Left(NamedTuple):
    """What is left of a limit."""

    remaining: int
    limit: int
    reset_s: float


def limit_headers(claim: Claim, verdict: Verdict) -> dict[str, str]:
    """Return `x-ratelimit-*` for the limits per minute that hold, and the warning of budgets."""
    headers: dict[str, str] = {}
    pairs = list(zip(claim.scopes, verdict.uses, strict=True))
    requests = tokens = None
    for scope, use in pairs:
        limits, reset_s = scope.limits, use.reset_s
        requests = _less_left(requests, limits.requests_per_minute, use.num_requests, reset_s)
        tokens = _less_left(tokens, limits.tokens_per_minute, use.num_tokens, reset_s)
    if requests is not None:
        headers["x-ratelimit-limit-requests"] = str(requests.limit)
        headers["x-ratelimit-remaining-requests"] = str(max(0, requests.remaining))
        headers["x-ratelimit-reset-requests"] = duration(requests.reset_s)
    if tokens is not None:
        headers["x-ratelimit-limit-tokens"] = str(tokens.limit)
        headers["x-ratelimit-remaining-tokens"] = str(max(0, tokens.remaining))
        reset = headers.get("x-ratelimit-reset-requests")
        if requests is None or reset is None or requests.reset_s != tokens.reset_s:
            reset = duration(tokens.reset_s)
        headers["x-ratelimit-reset-tokens"] = reset
    warnings = budget_warnings(pairs)
    if warnings:
        headers[BUDGET_WARNING] = "; ".join(warnings)
    return headers


def _less_left(left: _Left | None, limit: int | None, used: int, reset_s: float) -> _Left | None:
    """Return what is left of a limit, if that is less than is left of another."""
    if limit is None or (left is not None and left.remaining <= limit - used):
        return left
    return _Left(limit - used, limit, reset_s)


def budget_warnings(pairs: Sequence[tuple[Scope, ScopeUse]]) -> list[str]:
    """Name each budget that is used up beyond its soft limit, `tokens per day: 85% used`."""
    warnings = []
    for scope, use in pairs:
        for words, limit, used in budgets_of(scope, use):
            if used >= scope.limits.soft_limit * limit:
                warnings.append(f"{words}: {100 * used // limit}% used")
    return warnings


def budgets_of(scope: Scope, use: ScopeUse) -> list[tuple[str, int, int]]:
    """Return each budget that is set: its name, its tokens, and how many are used."""
    limits, budgets = scope.limits, []
    if limits.tokens_per_day is not None:
        budgets.append(("tokens per day", limits.tokens_per_day, use.day_tokens))
    if limits.tokens_per_month is not None:
        budgets.append(("tokens per month", limits.tokens_per_month, use.month_tokens))
    return budgets


def duration(seconds: float) -> str:
    """Write a duration as OpenAI does: `0s`, `61ms`, `1.5s`, `1m1s`."""
    if 0 < seconds < 1:
        return f"{max(1, round(seconds * 1000))}ms"
    minutes, rest = divmod(seconds, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
