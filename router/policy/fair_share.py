"""Whose turn it is when requests have to wait: locality-aware deficits between tenants.

A round gives every waiting tenant one quantum, in proportion to its weight, and what it is served
is taken off: computed tokens in full, cached ones at a tenth, so that a tenant whose prompts hit
gets more requests for its share. A tenant with nothing left waits for the next round, which begins
when no waiting tenant has anything left. Savings are not kept while it has nothing to wait for;
debts are. After DLPM (arXiv 2501.14312), with turns by tenant instead of by prefix.

Priorities go first, except that each waiting lower one gets a floor: a share of all that is served
above it.

Other gateways' queues count in the rounds as far as they were heard of. A tenant with nothing left
yields for a moment to one with something left that waits elsewhere: that gateway takes what became
free. If it does not, nobody yields again until the next word of it: no target stands idle for long.

Pure; it knows no targets, and instants are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

YIELD_S = 0.2
"""How long a tenant yields to another gateway's: that one looks for a place every 0.1 s."""


class Charged(NamedTuple):
    """A tenant at one gateway: tokens charged since it has an account, and whether it waits."""

    tokens: float
    weight: float
    is_waiting: bool


class Rival(NamedTuple):
    """A tenant at other gateways: tokens charged since they were last heard, and if it waits."""

    cost: float
    weight: float
    is_waiting: bool


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A waiting request of `num_tokens` prompt tokens; it may have no turn before `not_before`.

    `stays_until`: so long at most it waits for the target that has its prefix, None before it does.
    """

    request_id: str
    tenant: str
    weight: float
    priority: int
    num_tokens: int
    deadline: float
    not_before: float = 0.0
    stays_until: float | None = None


@dataclass(slots=True)
class _Tenant:
    """What a waiting tenant may still be served in this round, negative for debts.

    `charged` is all that it was charged here since it has an account.
    """

    deficit: float = 0.0
    weight: float = 1.0
    num_waiting: int = 0
    waits_elsewhere: bool = False
    charged: float = 0.0

    @property
    def waits(self) -> bool:
        return self.num_waiting > 0 or self.waits_elsewhere


@dataclass(slots=True)
class FairShare:
    """The queues of one model's waiting requests; `quantum` in charged tokens."""

    quantum: float
    floor_share: float
    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    # priority -> tenant -> request ids, in order of arrival
    _classes: dict[int, dict[str, OrderedDict[str, None]]] = field(default_factory=dict)
    _credit: dict[int, float] = field(default_factory=dict)
    _last_turn: dict[str, int] = field(default_factory=dict)
    _num_turns: int = 0
    _yields_until: float | None = None
    _yields_no_more: bool = False

    @property
    def has_rivals(self) -> bool:
        """Whether somebody waits at another gateway."""
        return any(account.waits_elsewhere for account in self._tenants.values())

    def charged(self) -> dict[str, Charged]:
        """Return what each tenant was charged here, for those that were, or that wait."""
        return {
            tenant: Charged(account.charged, account.weight, account.num_waiting > 0)
            for tenant, account in self._tenants.items()
            if account.num_waiting or account.charged
        }

    def hear(self, rivals: Mapping[str, Rival]) -> None:
        """Take in how tenants have done at the other gateways since these were last heard."""
        for tenant, rival in rivals.items():
            if rival.is_waiting or tenant in self._tenants:
                self._open(tenant, rival.weight).deficit -= rival.cost
        for tenant, account in self._tenants.items():
            account.waits_elsewhere = tenant in rivals and rivals[tenant].is_waiting
        self._yields_until, self._yields_no_more = None, False
        self._settle()

    def __len__(self) -> int:
        return len(self._tickets)

    def num_waiting(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        account = self._tenants.get(tenant)
        return account.num_waiting if account is not None else 0

    def get(self, request_id: str) -> Ticket | None:
        """Return the ticket of a waiting request."""
        return self._tickets.get(request_id)

    def enqueue(self, ticket: Ticket) -> None:
        """Let a request wait; a tenant that comes to wait starts with a quantum, or its debt."""
        assert ticket.request_id not in self._tickets, f"{ticket.request_id} waits already"
        self._tickets[ticket.request_id] = ticket
        self._open(ticket.tenant, ticket.weight).num_waiting += 1
        tenants = self._classes.setdefault(ticket.priority, {})
        tenants.setdefault(ticket.tenant, OrderedDict())[ticket.request_id] = None

    def _open(self, tenant: str, weight: float) -> _Tenant:
        """Return the account of a tenant that waits from now on, if it did not before."""
        account = self._tenants.setdefault(tenant, _Tenant())
        account.weight = weight
        if not account.waits and account.deficit >= 0:
            account.deficit = self.quantum * weight
        return account

    def must_yield(self, tenant: str, now: float) -> bool:
        """Say whether a tenant that comes now has to let those go first who wait elsewhere."""
        account = self._tenants.get(tenant)
        return account is not None and account.deficit <= 0 and self._yields(now)

    def next(self, now: float) -> Ticket | None:
        """Return whose turn it is; it waits on until `remove`. None when nobody may go now."""
        heads = {priority: self._heads(priority, now) for priority in sorted(self._classes)}
        waiting = [priority for priority, tickets in heads.items() if tickets]
        if not waiting or self._must_all_yield(heads.values(), now):
            return None
        chosen = (self._fairest(heads[priority]) for priority in waiting[1:])
        owed = next((ticket for ticket in chosen if self._is_owed(ticket)), None)
        return owed or self._fairest(heads[waiting[0]])

    def found_full(self) -> None:
        """Note that there is no place: what was yielded has been taken."""
        self._yields_until = None

    def placed(self, tenant: str) -> None:
        """Note that a tenant was served, so that others come first where they are its equals."""
        account = self._tenants.get(tenant)
        if self._yields_until is not None and account is not None and account.deficit <= 0:
            self._yields_no_more = True
        self._num_turns += 1
        self._last_turn[tenant] = self._num_turns

    def next_instant(self, blocked_until: float) -> float | None:
        """Return when somebody may go at the earliest, None when nobody waits; O(waiting)."""
        if not self._tickets:
            return None
        earliest = min(ticket.not_before for ticket in self._tickets.values())
        return max(blocked_until, earliest, self._yields_until or 0.0)

    def served(self, request_id: str, cost: float) -> None:
        """Take a request that was placed off the queue and charge its tenant."""
        ticket = self._tickets[request_id]
        for priority in self._classes:
            if priority > ticket.priority:
                credit = self._credit.get(priority, 0.0) + self.floor_share * cost
                self._credit[priority] = min(credit, self.quantum)
        if ticket.priority in self._credit:
            self._credit[ticket.priority] -= cost
        self.charge(ticket.tenant, cost)
        self.remove(request_id)

    def served_at_once(self, tenant: str, weight: float, cost: float) -> None:
        """Charge a request that did not wait here, because somebody waits elsewhere meanwhile."""
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant(deficit=self.quantum * weight, weight=weight)
        self.charge(tenant, cost)

    def charge(self, tenant: str, cost: float) -> None:
        """Charge a tenant for more of what it was served; one that is unknown owes nothing."""
        account = self._tenants.get(tenant)
        if account is not None:
            account.deficit -= cost
            account.charged += cost

    def remove(self, request_id: str) -> None:
        """Forget a request that waits no longer; unknown ones are ignored."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        tenants = self._classes[ticket.priority]
        del tenants[ticket.tenant][request_id]
        if not tenants[ticket.tenant]:
            del tenants[ticket.tenant]
        if not tenants:
            del self._classes[ticket.priority]
            self._credit.pop(ticket.priority, None)
        account = self._tenants[ticket.tenant]
        account.num_waiting -= 1
        self._settle()

    def _settle(self) -> None:
        """Drop what is left of the tenants that wait no longer; debts too, once nobody waits."""
        for account in self._tenants.values():
            if not account.waits:
                account.deficit = min(0.0, account.deficit)
        if not any(account.waits for account in self._tenants.values()):
            self._tenants.clear()  # Nobody was kept waiting by whoever is in debt now.

    def _heads(self, priority: int, now: float) -> list[Ticket]:
        """Return the oldest request of each tenant that may have its turn now."""
        heads = (self._head(ids, now) for ids in self._classes[priority].values())
        return [ticket for ticket in heads if ticket is not None]

    def _head(self, ids: OrderedDict[str, None], now: float) -> Ticket | None:
        tickets: Iterator[Ticket] = (self._tickets[request_id] for request_id in ids)
        return next((ticket for ticket in tickets if ticket.not_before <= now), None)

    def _must_all_yield(self, heads: Iterable[list[Ticket]], now: float) -> bool:
        """Say whether nobody here has anything left while somebody elsewhere does."""
        here = {ticket.tenant for tickets in heads for ticket in tickets}
        if any(self._tenants[tenant].deficit > 0 for tenant in here):
            return False
        return self._yields(now)

    def _yields(self, now: float) -> bool:
        """Say whether somebody elsewhere has something left, and is still to be waited for."""
        if self._yields_no_more or not self._has_creditor_elsewhere():
            return False
        if self._yields_until is None:
            self._yields_until = now + YIELD_S
        return now < self._yields_until

    def _has_creditor_elsewhere(self) -> bool:
        return any(a.waits_elsewhere and a.deficit > 0 for a in self._tenants.values())

    def _fairest(self, heads: list[Ticket]) -> Ticket:
        """Take the tenant with something left whose last turn is longest ago."""
        if all(self._tenants[ticket.tenant].deficit <= 0 for ticket in heads):
            self._begin_rounds(heads)
        left = [ticket for ticket in heads if self._tenants[ticket.tenant].deficit > 0] or heads
        return min(left, key=lambda ticket: self._last_turn.get(ticket.tenant, 0))

    def _is_owed(self, ticket: Ticket) -> bool:
        """Say whether a low priority has earned its floor's worth of a request."""
        return self._credit.get(ticket.priority, 0.0) >= min(ticket.num_tokens, self.quantum)

    def _begin_rounds(self, heads: list[Ticket]) -> None:
        """Let as many rounds pass as it takes until somebody has something left.

        None passes while somebody elsewhere has: then one in debt goes, as nobody else did.
        """
        if self._has_creditor_elsewhere():
            return
        here = {ticket.tenant for ticket in heads}
        accounts = [
            account
            for tenant, account in self._tenants.items()
            if tenant in here or account.waits_elsewhere
        ]
        num_rounds = min(ceil(-a.deficit / (self.quantum * a.weight)) for a in accounts)
        for account in accounts:
            account.deficit += self.quantum * account.weight * max(1, num_rounds)
        if all(account.deficit <= 0 for account in accounts):
            self._begin_rounds(heads)
