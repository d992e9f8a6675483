"""The tenants' limits during a replay: the gateway's own rules, in virtual time.

One account for all gateways, as in a fleet with a state Redis. The replay begins at midnight of a
month's first day (UTC). A client that is refused does not come again.
"""

from __future__ import annotations

import math

from engine.frontend.charge import charge
from router.config import Limits
from router.tenancy.expected_output import ExpectedOutput
from router.tenancy.limit_ledger import LimitLedger
from router.tenancy.limits import Claim, Scope, Settlement
from sim.config import ReplayConfig
from sim.workload import Arrival

_GATEWAY = "replay"


class TenantLimits:
    """Claims and settlements by tenant; one without limits is never refused."""

    def __init__(self, config: ReplayConfig) -> None:
        self._ledger = LimitLedger()
        self._expected = ExpectedOutput()
        self._scopes = {
            name: Scope(f"tenant/{name}", traffic.limits)
            for name, traffic in config.tenants.items()
            if traffic.limits != Limits()
        }

    def admit(self, arrival: Arrival, now: float) -> bool:
        """Claim what a request is expected to take; False when a limit is used up."""
        scope = self._scopes.get(arrival.tenant)
        if scope is None:
            return True
        expected = self._expected.tokens(arrival.tenant, max_tokens=None)
        claim = Claim(
            id=arrival.request_id, scopes=(scope,), num_tokens=arrival.num_prompt_tokens + expected
        )
        return self._ledger.reserve(claim, gateway=_GATEWAY, now=now).hit is None

    def settle_answer(self, arrival: Arrival, *, num_cached_tokens: int, now: float) -> None:
        """Charge an answered request."""
        if arrival.tenant in self._scopes:
            self._expected.note(arrival.tenant, arrival.num_output_tokens)
        self.settle(
            arrival,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=arrival.num_output_tokens,
            now=now,
        )

    def settle(
        self, arrival: Arrival, *, num_cached_tokens: int, num_output_tokens: int, now: float
    ) -> None:
        """Charge what ran of a request."""
        charged = charge(
            num_uncached_tokens=arrival.num_prompt_tokens - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )
        self._settle(arrival, math.ceil(charged), now)

    def withdraw(self, arrival: Arrival, now: float) -> None:
        """Charge nothing: no replica began it."""
        self._settle(arrival, 0, now)

    def _settle(self, arrival: Arrival, num_tokens: int, now: float) -> None:
        scope = self._scopes.get(arrival.tenant)
        if scope is not None:
            settlement = Settlement(
                id=arrival.request_id, scopes=(scope.name,), num_tokens=num_tokens
            )
            self._ledger.settle(settlement, now=now)
