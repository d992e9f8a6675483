"""How long the blocks of a placed prompt count as about to be there.

It does not know when they really are: the replica's events say that.
"""

from __future__ import annotations

_MIN_S = 5.0
_MAX_S = 120.0


def pending_ttl_s(expected_s: float) -> float:
    """Return the seconds for a prompt whose first token is expected after `expected_s`."""
    return min(_MAX_S, max(_MIN_S, 2 * expected_s))
