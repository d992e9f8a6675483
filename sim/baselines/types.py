"""What a baseline is asked, and what it may know: its own placements, and nothing of the engines.

One exception, `matched_blocks`, is for the greedy baseline, which follows exact events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Query:
    """One request to place; `hashes` are those of the full blocks of its prompt."""

    number: int
    request_id: str
    hashes: Sequence[bytes]
    num_prompt_tokens: int
    block_size: int
    session: str | None


@dataclass(slots=True, frozen=True)
class Worker:
    """One live replica: the requests that this router has running there, and its exact match."""

    name: str
    num_active: int
    matched_blocks: int


class Baseline(Protocol):
    """A policy of another system; it may remember what it has chosen."""

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        """Return the position of the chosen worker; `workers` is never empty."""
        ...


def least_active(workers: Sequence[Worker], number: int) -> int:
    """Return the position with the fewest running requests; ties rotate with the request."""
    count = len(workers)
    return min(range(count), key=lambda i: (workers[i].num_active, (i - number) % count))
