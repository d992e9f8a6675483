"""Greedy longest prefix without any guard: whoever holds most of the prompt gets it.

It sees the true caches, and shows why that is not enough: where all prompts begin alike, the first
replica to hold the beginning gets everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sim.baselines.types import Query, Worker


class GreedyPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take the most matched blocks; ties go to the first replica. It has no parameters."""

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        return max(range(len(workers)), key=lambda i: workers[i].matched_blocks)
