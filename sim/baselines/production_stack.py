"""vLLM production-stack: `prefixaware`, and its successor that weighs load against the match.

From its sources: `prefixaware` picks at random among the deepest holders in a trie that never
forgets and looks at no load; `loadaware` takes argmax matched / prompt - beta * (load - mean) /
max(1, mean). Its trie has chunks of 128 characters, ours the engine's blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

import msgspec

from sim.baselines.approximate_tree import ApproximateTree
from sim.baselines.types import Query, Worker


class PrefixAwareParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seed` of the draw among equals."""

    seed: int = 0


class LoadAwareParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`beta` is what a load of twice the mean costs, in shares of a prompt matched."""

    beta: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    tree_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: int = 0


class PrefixAware:
    """Deepest match, no load term."""

    def __init__(self, params: PrefixAwareParams) -> None:
        self._seed = params.seed
        self._tree = ApproximateTree(max_blocks=None)

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        scores = [self._tree.num_matched(worker.name, query.hashes) for worker in workers]
        chosen = _among_best(scores, f"{self._seed} {query.number}")
        self._tree.insert(workers[chosen].name, query.hashes)
        return chosen


class LoadAware:
    """Matched share of the prompt against relative load."""

    def __init__(self, params: LoadAwareParams) -> None:
        self._params = params
        self._tree = ApproximateTree(max_blocks=params.tree_blocks or None)

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        mean = fmean(worker.num_active for worker in workers)
        scores = [
            self._tree.num_matched(worker.name, query.hashes)
            * query.block_size
            / query.num_prompt_tokens
            - self._params.beta * (worker.num_active - mean) / max(1.0, mean)
            for worker in workers
        ]
        chosen = _among_best(scores, f"{self._params.seed} {query.number}")
        self._tree.insert(workers[chosen].name, query.hashes)
        return chosen


def _among_best(scores: Sequence[float], seed: str) -> int:
    best = max(scores)
    return random.Random(seed).choice([i for i, score in enumerate(scores) if score == best])
