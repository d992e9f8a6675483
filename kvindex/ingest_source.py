"""What an ingester asks of the engine that it follows, as a value of callables.

Whether the engine is one of ours or a foreign one retold, the ingester cannot tell.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from kvindex.hit_rule import CacheLayout
from kvindex.index import TRUST_MODES, LoadReport, TrustMode
from kvindex.registry import ReplicaRecord
from kvindex.snapshot import SnapshotData


class Trust(msgspec.Struct, frozen=True):
    """How far what an engine says can be trusted, and why no further."""

    mode: TrustMode
    reason: str = ""

    def at_most(self, other: Trust) -> Trust:
        """Return the lesser of two; this one where they are equal."""
        is_less = TRUST_MODES.index(other.mode) > TRUST_MODES.index(self.mode)
        return other if is_less else self


class IngestSource(msgspec.Struct, frozen=True, kw_only=True):
    """An engine core, as far as the index cares.

    `is_alive` is false while the engine core shows no heartbeat: then no lease is renewed.
    `make_record` describes the replica under an epoch, for the registry. `trust`: how far the
    engine's own account goes. `layout` is asked at each registration; None: every layer reads the
    whole past.
    """

    snapshot: Callable[[], Awaitable[SnapshotData]]
    report: Callable[[], LoadReport]
    is_alive: Callable[[], bool]
    make_record: Callable[[int], ReplicaRecord]
    trust: Callable[[], Trust] = lambda: Trust("EXACT")
    layout: Callable[[], CacheLayout | None] = lambda: None
