"""What a policy made of a recorded traffic, and what two of these say about each other in words.

It runs nothing; every sentence states what was computed, and says so where that decides little.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_FEW_REQUESTS = 100


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One replay, as far as a policy changes it; seconds, and shares of prompt tokens.

    `busiest_share`: of all computed prompt tokens, those of the replica that computed most.
    """

    policy: str
    params: Mapping[str, float]
    token_hit: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    shed: int
    fleet_token_hit: float | None
    fleet_ttft_p99_s: float | None
    busiest_share: float | None


def changes(now: Outcome, then: Outcome, *, num_replicas: int) -> list[str]:
    """Say what the policy of `then` would change, most important first."""
    if (now.policy, dict(now.params)) == (then.policy, dict(then.params)):
        return [f"The tenant is placed by {now.policy} with these parameters already."]
    found = [
        _hits(now.token_hit, then.token_hit),
        _fleet_hits(now, then),
        _first_tokens(now, then),
        _balance(now.busiest_share, then.busiest_share, num_replicas),
        _shed(now.shed, then.shed),
    ]
    return [line for line in found if line is not None]


def caveats(num_requests: int, *, latency: str) -> list[str]:
    """Say what limits the comparison: a small recording, and times of a simulator."""
    found = []
    if num_requests < _FEW_REQUESTS:
        found.append(f"Only {num_requests} requests of the tenant are recorded: too few to decide.")
    found.append(f"Times are by the profile {latency}: compare them with each other, not a clock.")
    return found


def _hits(now: float | None, then: float | None) -> str | None:
    if now is None or then is None:
        return "The recording has lengths only: the hit rate is unknown."
    what = "of the tenant's prompt tokens would come from a cache"
    if _percent(now) == _percent(then):
        return f"{_percent(then)} {what} as now."
    return f"{_percent(then)} {what} instead of {_percent(now)}."


def _fleet_hits(now: Outcome, then: Outcome) -> str | None:
    before, after = now.fleet_token_hit, then.fleet_token_hit
    is_alone = (before, after) == (now.token_hit, then.token_hit)
    if before is None or after is None or before == after or is_alone:
        return None
    return (
        f"Over all tenants it would be {_percent(after)} of prompt tokens instead of "
        f"{_percent(before)}."
    )


def _first_tokens(now: Outcome, then: Outcome) -> str | None:
    if now.ttft_p50_s is None or then.ttft_p50_s is None:
        return None
    line = f"Half of its first tokens would come within {_change(now.ttft_p50_s, then.ttft_p50_s)}"
    if now.ttft_p99_s is not None and then.ttft_p99_s is not None:
        line += f", 99 % within {_change(now.ttft_p99_s, then.ttft_p99_s)}"
    return f"{line}."


def _change(now: float, then: float) -> str:
    before, after = _time(now), _time(then)
    return f"{after} as now" if before == after else f"{after} instead of {before}"


def _balance(now: float | None, then: float | None, num_replicas: int) -> str | None:
    if now is None or then is None or num_replicas < 2:
        return None
    return (
        f"The busiest of {num_replicas} replicas would compute {_percent(then)} of all prompt "
        f"tokens instead of {_percent(now)}; even would be {_percent(1 / num_replicas)}."
    )


def _shed(now: int, then: int) -> str | None:
    if now == then:
        return f"{then:,} of its requests would be shed as now." if then else None
    return f"{then:,} of its requests would be shed instead of {now:,}."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
