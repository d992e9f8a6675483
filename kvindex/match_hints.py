"""Where earlier matches ended, as hints for the next one on a chain that begins alike.

A conversation comes back with a longer chain, and most replicas hold as much of it as before. The
hints only say where to look first; what a match answers does not depend on them. It knows no Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

MAX_CHAINS = 8192
MAX_ENDS = 256
"""Ends told of one chain; of more, every so many-th."""

FIRST_ANCHOR = 7
"""Chains are recognised by their blocks at positions 7, 15, 31, ...: a few look-ups each."""


class MatchHints:
    """The ends of recent matches by anchor, the newest `max_chains` anchors."""

    def __init__(self, *, max_chains: int = MAX_CHAINS) -> None:
        self._max_chains = max_chains
        self._ends: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def ends_for(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Return where matches on the longest chain known to begin alike ended, in order."""
        for position in reversed(list(_anchors(len(hashes)))):
            ends = self._ends.get(hashes[position])
            if ends is not None:
                return ends
        return ()

    def remember(self, hashes: Sequence[bytes], ends: Iterable[int]) -> None:
        """Note how many leading blocks targets were found to hold."""
        told = tuple(sorted(set(ends)))
        told = told[:: len(told) // MAX_ENDS + 1]
        for position in _anchors(len(hashes)):
            anchor = hashes[position]
            self._ends[anchor] = told
            self._ends.move_to_end(anchor)
        while len(self._ends) > self._max_chains:
            self._ends.popitem(last=False)


def _anchors(length: int) -> Iterator[int]:
    position = FIRST_ANCHOR
    while position < length:
        yield position
        position = 2 * position + 1
