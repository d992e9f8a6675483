"""Whether guessing pays: what it costs by the clock against what it saves, request by request.

A request may lose little by its guesses: what they cost is paid from an account that right guesses
and, slowly, every token fill. So a workload in which nothing can be guessed is slowed by a known
share at most, and guessing is tried again from time to time. It knows neither tokens nor clocks.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from dataclasses import dataclass
from statistics import median

_ALLOWANCE = 0.01
"""Of every token's cost, so much may be lost by guesses."""

_FIRST_BALANCE = 0.4
_MAX_BALANCE = 4.0
_MEMORY = 0.85
"""Per verified row of guesses, older ones count by this less."""

_PRIOR_TRIALS = 2.0
_UNKNOWN_SLOPE = 0.15
"""What one more row is taken to cost, as a share of a step, before it was measured."""

_SAMPLES = 7


class StepCosts:
    """Seconds of a decode step by its rows: medians of the last measurements."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # those measured, in order

    def observe(self, num_rows: int, step_s: float) -> None:
        """Take in one step that only decoded."""
        samples = self._samples.setdefault(num_rows, deque(maxlen=_SAMPLES))
        if not samples:
            insort(self._sizes, num_rows)
        samples.append(step_s)
        self._medians[num_rows] = median(samples)

    def of(self, num_rows: int) -> float | None:
        """Return the cost of a step, between two measured sizes by their line; None of nothing.

        O(log of the measured sizes), because it is asked several times per request and step.
        """
        known = self._medians.get(num_rows)
        if known is not None or not self._sizes:
            return known
        i = bisect(self._sizes, num_rows)
        if i == 0:
            above = self._sizes[0]
            return self._medians[above] / (1 + _UNKNOWN_SLOPE * (above - num_rows))
        below = self._sizes[i - 1]
        low = self._medians[below]
        if i == len(self._sizes):
            return low * (1 + _UNKNOWN_SLOPE * (num_rows - below))
        above = self._sizes[i]
        return low + (self._medians[above] - low) * (num_rows - below) / (above - below)


@dataclass(slots=True)
class _Guesses:
    """How often guesses were right lately: decayed counts."""

    num_right: float = 0.0
    num_tried: float = 0.0

    def observe(self, *, num_drafted: int, num_accepted: int) -> None:
        self.num_right = _MEMORY * self.num_right + num_accepted
        self.num_tried = _MEMORY * self.num_tried + min(num_accepted + 1, num_drafted)

    def rate(self, prior: float) -> float:
        """Return the chance that a guess is right, where those before it are."""
        return (self.num_right + _PRIOR_TRIALS * prior) / (self.num_tried + _PRIOR_TRIALS)


@dataclass(slots=True)
class _Account:
    """One request: what it may lose, in tokens' costs, and how well it can be guessed."""

    guesses: _Guesses
    balance: float = _FIRST_BALANCE
    asked: float = 0.0  # cost of each guess that was allowed last


class Payoff:
    """Says how many guesses each request should get: as many as save most, at most `max_drafts`."""

    def __init__(self, *, max_drafts: int) -> None:
        self.costs = StepCosts()
        self._max_drafts = max_drafts
        self._accounts: dict[str, _Account] = {}
        self._all = _Guesses()

    def limit(self, request_id: str, *, num_requests: int, num_rows: int) -> int:
        """Return how many guesses to verify in the next step, 0 for none.

        That step has `num_requests` requests, and `num_rows` rows so far.
        """
        account = self._account(request_id)
        account.balance = min(account.balance + _ALLOWANCE, _MAX_BALANCE)
        step_s, plain_s = self.costs.of(num_rows), self.costs.of(num_requests)
        if step_s is None or plain_s is None:
            return 0
        token_s = plain_s / num_requests
        rate = account.guesses.rate(self._all.rate(0.5))
        best, best_gain, right, expected = 0, 0.0, 1.0, 0.0
        for count in range(1, self._max_drafts + 1):
            right *= rate
            expected += right
            more_s = self.costs.of(num_rows + count)
            assert more_s is not None
            cost = max(0.0, more_s - step_s) / token_s
            gain = (1 + expected) / (1 + cost)
            if cost <= account.balance and gain > best_gain:
                best, best_gain, account.asked = count, gain, cost / count
        return best

    def observe(self, request_id: str, *, num_drafted: int, num_accepted: int) -> None:
        """Take in how many guesses of a request were right."""
        account = self._account(request_id)
        account.guesses.observe(num_drafted=num_drafted, num_accepted=num_accepted)
        self._all.observe(num_drafted=num_drafted, num_accepted=num_accepted)
        balance = account.balance + num_accepted - account.asked * num_drafted
        account.balance = min(balance, _MAX_BALANCE)

    def forget(self, request_id: str) -> None:
        """Close the account of a request that runs no more; unknown ids are ignored."""
        self._accounts.pop(request_id, None)

    def _account(self, request_id: str) -> _Account:
        found = self._accounts.get(request_id)
        if found is None:
            found = self._accounts[request_id] = _Account(_Guesses())
        return found
