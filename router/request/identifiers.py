"""Random names and seeds of requests, from one generator of this process.

The operating system is asked once: a call for every id costs more than all else about it. They tell
requests apart and start samplers; nothing that must not be guessed comes from here.
"""

from __future__ import annotations

import random

_random = random.Random()  # Seeded by the operating system.


def request_id() -> str:
    """Return 32 hex digits that no other request has."""
    return f"{_random.getrandbits(128):032x}"


def suffix() -> str:
    """Return 8 hex digits that tell requests with one id apart."""
    return f"{_random.getrandbits(32):08x}"


def seed() -> int:
    """Return a seed for a request that brings none."""
    return _random.getrandbits(63)
