"""What is left of a tenant's limits, in the headers that OpenAI's clients know.

Where tenant and key both have a limit, the one with less left is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.tenancy.limits import Claim, Scope, ScopeUse, Verdict

BUDGET_WARNING = "x-prefixfleet-budget-warning"


def limit_headers(claim: Claim, verdict: Verdict) -> dict[str, str]:
    """Return `x-ratelimit-*` for the limits per minute that hold, and the warning of budgets."""
    headers: dict[str, str] = {}
    pairs = list(zip(claim.scopes, verdict.uses, strict=True))
    requests = [(s.limits.requests_per_minute, use.num_requests, use) for s, use in pairs]
    tokens = [(s.limits.tokens_per_minute, use.num_tokens, use) for s, use in pairs]
    for name, rows in (("requests", requests), ("tokens", tokens)):
        left = [(limit - used, limit, use) for limit, used, use in rows if limit is not None]
        if left:
            remaining, limit, use = min(left, key=lambda row: row[0])
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, remaining))
            headers[f"x-ratelimit-reset-{name}"] = duration(use.reset_s)
    warnings = budget_warnings(pairs)
    if warnings:
        headers[BUDGET_WARNING] = "; ".join(warnings)
    return headers


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
    budgets = (
        ("tokens per day", scope.limits.tokens_per_day, use.day_tokens),
        ("tokens per month", scope.limits.tokens_per_month, use.month_tokens),
    )
    return [(words, limit, used) for words, limit, used in budgets if limit is not None]


def duration(seconds: float) -> str:
    """Write a duration as OpenAI does: `0s`, `61ms`, `1.5s`, `1m1s`."""
    if 0 < seconds < 1:
        return f"{max(1, round(seconds * 1000))}ms"
    minutes, rest = divmod(seconds, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
