"""What of the index's load figures is this gateway's own work.

The planner counts its own work without delay; what it wants from the index is the work of the
others. The two are told apart here, by what the index has confirmed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvindex.index import Reservation, Target, TargetMatch

ReservationKey = tuple[Target, str, int]
"""(target, request id, attempt)."""


@dataclass(slots=True)
class OwnReservations:
    """Reservations that the index has confirmed and not yet confirmed to be released."""

    _reserved: dict[ReservationKey, tuple[int, int]] = field(default_factory=dict)
    _tokens: Counter[Target] = field(default_factory=Counter)
    _blocks: Counter[Target] = field(default_factory=Counter)
    _requests: Counter[Target] = field(default_factory=Counter)

    def reserved(self, reservation: Reservation) -> None:
        """Note a confirmed reservation."""
        target = reservation.target
        key = (target, reservation.request_id, reservation.attempt)
        self._reserved[key] = (reservation.prefill_tokens, reservation.num_blocks)
        self._tokens[target] += reservation.prefill_tokens
        self._blocks[target] += reservation.num_blocks
        self._requests[target] += 1

    def prefill_released(self, key: ReservationKey) -> None:
        """Note that the prefill tokens of a reservation are counted no more."""
        tokens, blocks = self._reserved.get(key, (0, 0))
        if tokens:
            self._tokens[key[0]] -= tokens
            self._reserved[key] = (0, blocks)

    def released(self, key: ReservationKey) -> None:
        """Note that a reservation is counted no more."""
        self.prefill_released(key)
        if key in self._reserved:
            _, blocks = self._reserved.pop(key)
            self._blocks[key[0]] -= blocks
            self._requests[key[0]] -= 1

    def without(self, matches: Sequence[TargetMatch]) -> list[TargetMatch]:
        """Return the matches with the load of the other gateways only."""
        return [
            msgspec.structs.replace(
                match,
                reserved_prefill_tokens=max(
                    0, match.reserved_prefill_tokens - self._tokens[match.target]
                ),
                reserved_blocks=max(0, match.reserved_blocks - self._blocks[match.target]),
                num_reserved=max(0, match.num_reserved - self._requests[match.target]),
            )
            for match in matches
        ]
