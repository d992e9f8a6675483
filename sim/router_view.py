"""What a gateway knows of the caches when it places a request.

`IndexView` is the real index, fed by the replicas' own KV events; `HistoryView` is what a router
without events remembers of its own placements. Neither decides anything; when an event arrives is
the simulation's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvindex.foundation.clock import Clock
from kvindex.index import (
    IndexOp,
    LoadReport,
    SequencedOps,
    Target,
)
from kvindex.memory_index import MemoryIndex
from router.policy.types import TargetView
from sim.baselines.approximate_tree import ApproximateTree

FOREVER_S = math.inf


class RouterView(Protocol):
    """Describes every target to the planner, for one chain."""

    def views(self, hashes: Sequence[bytes]) -> list[TargetView]: ...

    def placed(self, target: Target, hashes: Sequence[bytes]) -> None:
        """Note where a prompt was sent."""
        ...


class IndexView:
    """One index and the event streams of all targets into it.

    `max_model_len`: what the KV cache of every replica holds, None for no bound.
    """

    def __init__(self, clock: Clock, *, max_model_len: int | None) -> None:
        self.index = MemoryIndex(clock)
        self._max_model_len = max_model_len
        self._epochs: dict[Target, int] = {}
        self.num_gaps = 0

    def register(self, target: Target, report: LoadReport, *, lease_s: float) -> None:
        """Open an epoch with an empty inventory."""
        self._epochs[target] = self.index.register(target, boot_ns=0, lease_s=lease_s)
        self.renew(target, report, lease_s=lease_s)

    def renew(self, target: Target, report: LoadReport, *, lease_s: float) -> None:
        """Extend the lease and bring a new report."""
        self.index.renew(target, self._epochs[target], lease_s=lease_s, report=report)

    def apply(self, target: Target, batch: SequencedOps) -> bool:
        """Apply one batch; False when one before it is missing."""
        result = self.index.apply(target, self._epochs[target], (batch,))
        if result.status != "gap":
            return True
        self.num_gaps += 1
        return False

    def load_snapshot(self, target: Target, seq: int, hashes: Iterable[bytes]) -> None:
        """Replace what is known of a target by what it holds as of batch `seq`."""
        ops = (IndexOp(kind="stored", hashes=tuple(hashes)),)
        self.index.load_snapshot(target, self._epochs[target], seq=seq, ops=ops)

    def views(self, hashes: Sequence[bytes]) -> list[TargetView]:
        max_model_len = self._max_model_len
        return [
            TargetView(
                target=match.target,
                mode=(report := match.report).mode,
                matched_blocks=match.matched_blocks,
                pending_blocks=match.pending_blocks,
                reserved_prefill_tokens=match.reserved_prefill_tokens,
                num_reserved=match.num_reserved,
                num_reserved_blocks=match.reserved_blocks,
                kv_tokens=max_model_len,
                kv_usage=report.kv_usage,
                prefill_tokens_per_s=report.prefill_tokens_per_s or None,
                max_model_len=max_model_len,
                draining=report.draining,
            )
            for match in self.index.match(hashes)
        ]

    def placed(self, target: Target, hashes: Sequence[bytes]) -> None:
        """Nothing: the replica's events will tell."""


class HistoryView:
    """A router's own placements, as many blocks per target as its cache has.

    It hears nothing of evictions and nothing of other routers.
    """

    def __init__(
        self, targets: Sequence[Target], *, blocks: int, max_model_len: int | None
    ) -> None:
        self._targets = targets
        self._max_model_len = max_model_len
        self._tree = ApproximateTree(max_blocks=blocks)

    def views(self, hashes: Sequence[bytes]) -> list[TargetView]:
        return [
            TargetView(
                target=target,
                mode="FALLBACK",
                matched_blocks=self._tree.num_matched(target.replica, hashes),
                max_model_len=self._max_model_len,
            )
            for target in self._targets
        ]

    def placed(self, target: Target, hashes: Sequence[bytes]) -> None:
        self._tree.insert(target.replica, hashes)
