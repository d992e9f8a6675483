"""What all scripts of the state store share: the prefix of its keys and how they are loaded.

It knows no connection; see docs/tenancy.md for what is kept there.
"""

from __future__ import annotations

from kvindex.redis_script import RedisScript

PREFIX = "pf:{state}:"


def state_script(name: str) -> RedisScript:
    """Return one script of `lua/`, behind the functions that all of them share."""
    return RedisScript(name, after=("state",), package="router.tenancy")
