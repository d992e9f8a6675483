"""SGLang's `cache_aware`: an approximate tree with a threshold, until the load is out of balance.

From the sgl-router sources: imbalanced if max - min > abs and max > rel * min, then the least
loaded worker; else the worker with the longest match if it exceeds the threshold of the prompt,
else the least loaded. Defaults are those of its command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from sim.baselines.approximate_tree import ApproximateTree
from sim.baselines.types import Query, Worker, least_active


class SGLangParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router's flags; `tree_blocks` is its tree size, in blocks of each worker (0: no end)."""

    cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.3
    balance_abs_threshold: Annotated[float, msgspec.Meta(ge=0)] = 64
    balance_rel_threshold: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    tree_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0


class SGLangCacheAware:
    """The policy with its tree; a prompt is inserted wherever it goes."""

    def __init__(self, params: SGLangParams) -> None:
        self._params = params
        self._tree = ApproximateTree(max_blocks=params.tree_blocks or None)

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        chosen = self._choose(query, workers)
        self._tree.insert(workers[chosen].name, query.hashes)
        return chosen

    def _choose(self, query: Query, workers: Sequence[Worker]) -> int:
        params = self._params
        least = least_active(workers, query.number)
        low, high = workers[least].num_active, max(worker.num_active for worker in workers)
        if high - low > params.balance_abs_threshold and high > params.balance_rel_threshold * low:
            return least
        matched = [self._tree.num_matched(worker.name, query.hashes) for worker in workers]
        best = max(matched)
        if best * query.block_size <= params.cache_threshold * query.num_prompt_tokens:
            return least
        holders = [i for i, count in enumerate(matched) if count == best]
        return min(holders, key=lambda i: workers[i].num_active)
