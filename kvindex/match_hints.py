"""What earlier matches found, as hints for the next one on a chain that begins alike.

A conversation comes back with a longer chain, and most replicas hold as much of it as before. The
hints are what lua/match.lua has returned, handed back as they are: they only say where to look
first, and what a match answers does not depend on them. It knows no Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

MAX_CHAINS = 8192

FIRST_ANCHOR = 7
"""Chains are recognised by their blocks at positions 7, 15, 31, ...: a few look-ups each."""


Found = TypeVar("Found")


class MatchHints(Generic[Found]):
    """The hints of recent matches by anchor, the newest `max_chains` anchors."""

    def __init__(self, *, max_chains: int = MAX_CHAINS) -> None:
        self._max_chains = max_chains
        self._found: OrderedDict[bytes, Found] = OrderedDict()

    def of_chain(self, hashes: Sequence[bytes]) -> Found | None:
        """Return those of the longest chain known to begin alike, None when there is none."""
        for position in reversed(list(_anchors(len(hashes)))):
            found = self._found.get(hashes[position])
            if found is not None:
                return found
        return None

    def remember(self, hashes: Sequence[bytes], found: Found) -> None:
        """Keep what a match on this chain has returned."""
        for position in _anchors(len(hashes)):
            anchor = hashes[position]
            self._found[anchor] = found
            self._found.move_to_end(anchor)
        while len(self._found) > self._max_chains:
            self._found.popitem(last=False)


def _anchors(length: int) -> Iterator[int]:
    position = FIRST_ANCHOR
    while position < length:
        yield position
        position = 2 * position + 1
