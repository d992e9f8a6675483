"""Placement by hash: of the prompt's prefix, or of the session. No load, no cache.

Rendezvous hashing: when a replica leaves, only what it had moves. Where a request has no session,
the session policy hashes its id, as routers do that fall back to the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from sim.baselines.types import Query, Worker


class HashOfPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hash the first `prefix_tokens` tokens (whole blocks, at least one)."""

    prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        wanted = max(1, self.prefix_tokens // query.block_size)
        leading = query.hashes[:wanted]
        return _rendezvous(leading[-1] if leading else query.request_id.encode(), workers)


class StickySession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hash the session, so that all its turns meet the same cache; it has no parameters."""

    def choose(self, query: Query, workers: Sequence[Worker]) -> int:
        return _rendezvous((query.session or query.request_id).encode(), workers)


def _rendezvous(key: bytes, workers: Sequence[Worker]) -> int:
    """Return the position whose name hashes highest together with the key."""
    return max(range(len(workers)), key=lambda i: _digest(key, workers[i].name))


def _digest(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(key, key=name.encode(), digest_size=8).digest()
