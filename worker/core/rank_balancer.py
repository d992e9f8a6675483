"""Which of several engine cores gets the next request: bookkeeping and choice, no I/O.

The front that asks is the only one that sends requests to these cores, so what it has sent and
not seen answered is their load, without the delay of their statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Load:
    """Requests in flight on one core: prompt tokens of those without an output yet, by key."""

    queued_prompts: dict[Hashable, int] = field(default_factory=dict)
    queued_tokens: int = 0
    num_live: int = 0
    chosen_at: int = 0


class RankBalancer:
    """Chooses by the steps that the queued prompts take, then by live requests, then in turn.

    `max_step_tokens` is what one step computes at most.
    """

    def __init__(self, num_ranks: int, *, max_step_tokens: int) -> None:
        self._loads = [_Load() for _ in range(num_ranks)]
        self._max_step_tokens = max_step_tokens
        self._num_choices = 0

    def choose(self, candidates: Collection[int]) -> int:
        """Return the least loaded of some ranks, at least one."""
        self._num_choices += 1
        rank = min(candidates, key=self._cost)
        self._loads[rank].chosen_at = self._num_choices
        return rank

    def begin(self, rank: int, key: Hashable, *, num_prompt_tokens: int) -> None:
        """Count a request that is sent to a rank; `key` is unique among those in flight."""
        load = self._loads[rank]
        load.queued_prompts[key] = num_prompt_tokens
        load.queued_tokens += num_prompt_tokens
        load.num_live += 1

    def prefilled(self, rank: int, key: Hashable) -> None:
        """Note that a request has its first output; later calls change nothing."""
        load = self._loads[rank]
        load.queued_tokens -= load.queued_prompts.pop(key, 0)

    def end(self, rank: int, key: Hashable) -> None:
        """Stop counting a request, whether or not it had an output."""
        self.prefilled(rank, key)
        self._loads[rank].num_live -= 1

    def _cost(self, rank: int) -> tuple[int, int, int]:
        load = self._loads[rank]
        return -(-load.queued_tokens // self._max_step_tokens), load.num_live, load.chosen_at
