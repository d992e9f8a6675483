"""A refusal by a limit, in the words that the client reads."""

from __future__ import annotations

import math

import msgspec

from engine.frontend.errors import RequestError
from router.tenancy.limits import Claim, LimitHit, Verdict

_WORDS = {
    "parallel": "requests at a time",
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "day": "tokens per day (UTC)",
    "month": "tokens per month (UTC)",
}


class LimitReached(RequestError):
    """Raised when a limit is used up; `claim` and `verdict` tell how far."""

    def __init__(self, claim: Claim, verdict: Verdict, hit: LimitHit) -> None:
        is_budget = hit.kind in ("day", "month")
        super().__init__(
            "quota_exceeded" if is_budget else "rate_limited",
            _explain(hit, claim.num_tokens),
            retry_after_s=hit.retry_after_s,
        )
        self.claim = claim
        self.verdict = verdict
        self.hit = hit

    @property
    def is_for_any_size(self) -> bool:
        """Whether nothing is left, so that no request would be let in now, however small."""
        use = next(use for use in self.verdict.uses if use.scope == self.hit.scope)
        used = {"requests": use.num_requests, "day": use.day_tokens, "month": use.month_tokens}
        return used.get(self.hit.kind, 0) >= self.hit.limit

    def later(self, seconds: float) -> LimitReached:
        """Return the same refusal as it reads some seconds later."""
        hit = msgspec.structs.replace(self.hit, retry_after_s=self.hit.retry_after_s - seconds)
        return LimitReached(self.claim, self.verdict, hit)


def _explain(hit: LimitHit, num_tokens: int) -> str:
    whose = "this key" if hit.scope.startswith("key/") else "this tenant"
    text = f"{whose} may use {hit.limit} {_WORDS[hit.kind]}"
    if hit.kind in ("tokens", "day", "month"):
        text += f", and this request needs {num_tokens}"
        if num_tokens > hit.limit:
            return f"{text}: shorten it, or ask for fewer tokens"
    return f"{text}; try again in {math.ceil(hit.retry_after_s)} s"
