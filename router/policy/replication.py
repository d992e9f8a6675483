"""Which cached prefixes are hot enough to be computed by another target on purpose.

It counts requests by the prefix that they find cached, forgetting exponentially. Placing the copy
is the planner's business; here is only whether, and not too often. Pure; instants are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

_MAX_PREFIXES = 4096


class ReplicationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One more holder for every `requests_per_copy` requests within about `half_life_s`.

    Prefixes of fewer than `min_tokens` are never worth it. `every_s` seconds lie between two copies
    of whatever prefix.
    """

    requests_per_copy: Annotated[float, msgspec.Meta(ge=1)] = 64.0
    half_life_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    min_tokens: Annotated[int, msgspec.Meta(ge=1)] = 512
    every_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0


@dataclass(slots=True)
class _Heat:
    count: float
    at: float


@dataclass(slots=True)
class HotPrefixes:
    """Heat by prefix, named by the hash of its last block; the longest untouched are forgotten."""

    config: ReplicationConfig
    _heat: OrderedDict[bytes, _Heat] = field(default_factory=OrderedDict)
    _next_copy_at: float = 0.0

    def touch(self, prefix: bytes, now: float) -> float:
        """Count a request that found a prefix cached; return the heat."""
        heat = self._heat.setdefault(prefix, _Heat(0.0, now))
        self._heat.move_to_end(prefix)
        halvings = (now - heat.at) / self.config.half_life_s
        heat.count = heat.count * 2.0**-halvings + 1.0
        heat.at = now
        if len(self._heat) > _MAX_PREFIXES:
            self._heat.popitem(last=False)
        return heat.count

    def wants_copy(self, heat: float, *, num_holders: int, now: float) -> bool:
        """Say whether a prefix of this heat deserves one holder more than it has, now."""
        wanted = 1 + heat // self.config.requests_per_copy
        return num_holders < wanted and now >= self._next_copy_at

    def copied(self, now: float) -> None:
        """Note that a copy was placed."""
        self._next_copy_at = now + self.config.every_s
