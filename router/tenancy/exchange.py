"""What the gateways of a fleet tell each other, so that shares and retries are the fleet's.

Once a second each says how its tenants' queues have moved on, hears the same of the others, and
takes its part of the retries that are left. It knows no store; without one, nobody is heard.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import msgspec

from router.policy.fair_share import Charged, Rival
from router.policy.planner import Planner
from router.policy.retry_budget import RetryBudget
from router.tenancy.limits import Exchanged, Notice

log = logging.getLogger("prefixfleet.router.tenancy")

_Says = dict[str, dict[str, Charged]]
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[_Says] = msgspec.json.Decoder(_Says)


class Exchange:
    """One gateway's side of it."""

    def __init__(self, planner: Planner, budget: RetryBudget) -> None:
        self._planner = planner
        self._budget = budget
        self._heard: dict[str, _Says] = {}

    def notice(self) -> Notice:
        """Return what there is to tell now."""
        return Notice(
            burst=self._budget.burst,
            earned=self._budget.earned,
            spent=self._budget.spent,
            says=_encoder.encode(self._planner.charged()).decode(),
        )

    def take(self, told: Notice, answer: Exchanged) -> None:
        """Take in the answer to a notice."""
        if answer.retries is not None:
            self._budget.grant(answer.retries, earned=told.earned, spent=told.spent)
        heard = {gateway: _read(gateway, says) for gateway, says in answer.others.items()}
        rivals: dict[str, dict[str, Rival]] = defaultdict(dict)
        for gateway, says in heard.items():
            for model, tenants in says.items():
                before = self._heard.get(gateway, {}).get(model, {})
                for tenant, now in tenants.items():
                    rivals[model][tenant] = _add(rivals[model].get(tenant), now, before.get(tenant))
        self._heard = heard
        self._planner.hear(rivals)


def _read(gateway: str, says: str) -> _Says:
    try:
        return _decoder.decode(says)
    except msgspec.DecodeError as error:
        log.warning("gateway=%s says what is not understood here: %s", gateway, error)
        return {}


def _add(known: Rival | None, now: Charged, before: Charged | None) -> Rival:
    """Add what a gateway has charged a tenant since it was last heard; counts may begin anew."""
    since = now.tokens
    if before is not None and before.tokens <= now.tokens:
        since -= before.tokens
    if known is None:
        return Rival(since, now.weight, now.is_waiting)
    return Rival(known.cost + since, now.weight, known.is_waiting or now.is_waiting)
