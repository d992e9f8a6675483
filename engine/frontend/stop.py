"""Where a text ends because a stop string is complete, and how much of it is safe to show.

Positions are characters of the whole output. It knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """A complete stop string at `start` up to (not including) `end`."""

    stop: str
    start: int
    end: int


def find_stop(
    text: str, stops: Sequence[str], *, searched: int, scan_from: int
) -> StopMatch | None:
    """Return the match that completes first in `text`; ties go to the first stop string.

    `searched` characters are known to hold no complete match; a match may still begin in them,
    but never before `scan_from`.
    """
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(scan_from, searched - len(stop) + 1))
        if start >= 0 and (best is None or start + len(stop) < best.end):
            best = StopMatch(stop, start, start + len(stop))
    return best


def num_held_back(text: str, stops: Sequence[str], *, scan_from: int) -> int:
    """Return how many last characters may still turn out to begin a stop string.

    At most the longest stop string less one character, and none that begin before `scan_from`.
    """
    held = 0
    for stop in stops:
        longest = min(len(stop) - 1, len(text) - scan_from)
        for length in range(longest, held, -1):
            if text.endswith(stop[:length]):
                held = length
                break
    return held
