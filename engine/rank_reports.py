"""Combines what the ranks of one executor report: a thing counts when every rank reported it.

The intersection of the ranks' multisets, taken as reports come in. KV events need none of this:
they come from the scheduler alone, whatever the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


class RankReports(Generic[ItemT]):
    """Reports that not all of `num_ranks` ranks have made yet.

    An item that one rank reports twice, and another never, is not common; each common occurrence
    is handed out once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._pending: list[Counter[ItemT]] = [Counter() for _ in range(num_ranks)]

    def add(self, rank: int, item: ItemT) -> bool:
        """Take in a report; return whether an occurrence is common to all ranks with it.

        That occurrence is taken from every rank. O(ranks).
        """
        self._pending[rank][item] += 1
        if not all(reports[item] for reports in self._pending):
            return False
        for reports in self._pending:
            reports[item] -= 1
            if not reports[item]:
                del reports[item]
        return True

    def missing(self, item: ItemT) -> list[int]:
        """Return the ranks that have not reported `item` (again)."""
        return [rank for rank, reports in enumerate(self._pending) if not reports[item]]

    def clear(self) -> None:
        """Forget what is pending: the ranks begin anew."""
        for reports in self._pending:
            reports.clear()
