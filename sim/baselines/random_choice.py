"""The blind baseline: any replica.

The draw is a function of seed and request number, so a replay can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from sim.baselines.types import Query, Worker


class RandomChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any replica, all equally likely."""

    seed: int = 0

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        return random.Random(f"{self.seed} {query.number}").randrange(len(workers))
