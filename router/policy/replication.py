"""Which cached prefixes are hot enough to be computed by another target on purpose.

Their heat is counted in prefix_heat.py, and placing the copy is the planner's business; here is
only whether, and not too often. Pure; instants are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from router.policy.prefix_heat import HALF_LIFE_S


class ReplicationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One more holder for every `requests_per_copy` requests within about `half_life_s`.

    Prefixes of fewer than `min_tokens` are never worth it. `every_s` seconds lie between two copies
    of whatever prefix.
    """

    requests_per_copy: Annotated[float, msgspec.Meta(ge=1)] = 64.0
    half_life_s: Annotated[float, msgspec.Meta(gt=0)] = HALF_LIFE_S
    min_tokens: Annotated[int, msgspec.Meta(ge=1)] = 512
    every_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0


@dataclass(slots=True)
class Replication:
    """When the next copy of a hot prefix may be made."""

    config: ReplicationConfig
    _next_copy_at: float = 0.0

    def wants_copy(self, heat: float, *, num_holders: int, now: float) -> bool:
        """Say whether a prefix of this heat deserves one holder more than it has, now."""
        wanted = 1 + heat // self.config.requests_per_copy
        return num_holders < wanted and now >= self._next_copy_at

    def copied(self, now: float) -> None:
        """Note that a copy was placed."""
        self._next_copy_at = now + self.config.every_s
