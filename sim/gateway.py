"""One simulated gateway: a router over what it sees of the fleet, and its reservations.

What the real gateway does around its planner, without HTTP. It knows no engine and no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from kvindex.index import Reservation, Target
from kvindex.memory_index import MemoryIndex
from router.policy.pending import pending_ttl_s
from router.policy.planner import Outcome
from router.policy.types import TargetView
from sim.placement import Attempt, Choice, Observer, Placed, Router
from sim.router_view import RouterView

GATEWAY_LEASE_S = 10.0


@dataclass(slots=True)
class Gateway:
    """A name, a router, and the view that it routes by.

    `index` is where it reserves, None where there is nobody else to tell. `observer` is shown every
    decision with the views behind it.
    """

    name: str
    router: Router
    view: RouterView
    block_size: int
    index: MemoryIndex | None = None
    observer: Observer | None = None
    _num_blocks: Counter[Target] = field(default_factory=Counter)

    def place(self, attempt: Attempt, now: float) -> Choice:
        """Choose a target for an attempt and count it as running there."""
        hashes = attempt.arrival.hashes
        views = self.view.views(hashes)
        if self.index is not None:
            views = [self._without_own(view) for view in views]
        chosen = self.router.choose(attempt, views, self.block_size, now)
        if self.observer is not None:
            self.observer(attempt, views, chosen)
        if isinstance(chosen, Placed):
            self.view.placed(chosen.target, hashes)
            self._reserve(attempt, chosen)
        return chosen

    def first_token(self, attempt: Attempt, placed: Placed) -> None:
        """Note that the prefill is over."""
        self.router.first_token(attempt)
        if self.index is not None:
            self.index.release_prefill(placed.target, attempt.arrival.request_id, attempt.number)

    def finish(self, attempt: Attempt, placed: Placed, outcome: Outcome, now: float) -> None:
        """Give the place back."""
        self.router.finish(attempt, outcome, now)
        if self.index is not None:
            self._num_blocks[placed.target] -= self._blocks_of(attempt)
            # As the live gateway: by now the events say what was written and what was evicted.
            self.index.release(
                placed.target, attempt.arrival.request_id, attempt.number, written=False
            )

    def renew(self) -> None:
        """Keep what it has reserved counted."""
        if self.index is not None:
            self.index.touch_gateway(self.name, lease_s=GATEWAY_LEASE_S)

    def _without_own(self, view: TargetView) -> TargetView:
        """Leave only the reservations of the others: its own work the router counts itself."""
        prefill_tokens, num_active = self.router.own_work(view.target)
        return msgspec.structs.replace(
            view,
            reserved_prefill_tokens=max(0, view.reserved_prefill_tokens - prefill_tokens),
            num_reserved=max(0, view.num_reserved - num_active),
            num_reserved_blocks=max(0, view.num_reserved_blocks - self._num_blocks[view.target]),
        )

    def _reserve(self, attempt: Attempt, placed: Placed) -> None:
        if self.index is None:
            return
        arrival = attempt.arrival
        self._num_blocks[placed.target] += self._blocks_of(attempt)
        self.index.reserve(
            Reservation(
                request_id=arrival.request_id,
                attempt=attempt.number,
                target=placed.target,
                gateway=self.name,
                prefill_tokens=placed.num_uncached_tokens,
                num_blocks=self._blocks_of(attempt),
                pending=arrival.hashes[placed.num_matched_blocks :],
                pending_ttl_s=pending_ttl_s(placed.expected_s),
            )
        )

    def _blocks_of(self, attempt: Attempt) -> int:
        """Return the blocks that prompt and output fill."""
        return -(-attempt.arrival.num_tokens // self.block_size)
