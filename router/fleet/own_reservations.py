"""What of the index's load figures is this gateway's own work.

The planner counts its own work without delay; what it wants from the index is the work of the
others. The two are told apart here, by what the index has confirmed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvindex.index import Reservation, Target, TargetMatch

ReservationKey = tuple[Target, str, int]
"""(target, request id, attempt)."""


@dataclass(slots=True)
class _Load:
    """What is reserved at one target."""

    num_requests: int = 0
    prefill_tokens: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class OwnReservations:
    """Reservations that the index has confirmed and not yet confirmed to be released."""

    _reserved: dict[ReservationKey, tuple[int, int]] = field(default_factory=dict)
    _loads: dict[Target, _Load] = field(default_factory=lambda: defaultdict(_Load))

    def reserved(self, reservation: Reservation) -> None:
        """Note a confirmed reservation."""
        target = reservation.target
        key = (target, reservation.request_id, reservation.attempt)
        self._reserved[key] = (reservation.prefill_tokens, reservation.num_blocks)
        load = self._loads[target]
        load.num_requests += 1
        load.prefill_tokens += reservation.prefill_tokens
        load.num_blocks += reservation.num_blocks

    def prefill_released(self, key: ReservationKey) -> None:
        """Note that the prefill tokens of a reservation are counted no more."""
        tokens, blocks = self._reserved.get(key, (0, 0))
        if tokens:
            self._loads[key[0]].prefill_tokens -= tokens
            self._reserved[key] = (0, blocks)

    def released(self, key: ReservationKey) -> None:
        """Note that a reservation is counted no more."""
        self.prefill_released(key)
        if key in self._reserved:
            _, blocks = self._reserved.pop(key)
            load = self._loads[key[0]]
            load.num_requests -= 1
            load.num_blocks -= blocks

    def without(self, matches: Sequence[TargetMatch]) -> list[TargetMatch]:
        """Return the matches with the load of the other gateways only."""
        return [self._without(match, self._loads.get(match.target)) for match in matches]

    def _without(self, match: TargetMatch, own: _Load | None) -> TargetMatch:
        if own is None or not own.num_requests:
            return match
        return msgspec.structs.replace(
            match,
            reserved_prefill_tokens=max(0, match.reserved_prefill_tokens - own.prefill_tokens),
            reserved_blocks=max(0, match.reserved_blocks - own.num_blocks),
            num_reserved=max(0, match.num_reserved - own.num_requests),
        )
