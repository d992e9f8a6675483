"""What an ingester remembers: how often which thing happened, and what is wrong now.

Data only; what follows from a fault is decided in kvindex/ingest.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class IngestCounters:
    """What has happened so far; the numbers only grow."""

    num_batches: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_failed_replays: int = 0
    num_snapshots: int = 0
    num_registrations: int = 0
    num_ignored_frames: int = 0
    num_undecodable: int = 0
    num_unknown_fields: int = 0
    num_unknown_events: int = 0


class Fault(msgspec.Struct, frozen=True):
    """Why the index cannot be trusted, and the sequence number to replay from, if one helps."""

    reason: str
    replay_from: int | None = None


@dataclass(slots=True)
class ForeignStreamCounters:
    """What has happened on a foreign engine's stream so far; the numbers only grow."""

    num_batches: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_failed_replays: int = 0
    num_disconnects: int = 0
    num_undecodable: int = 0
    num_unknown_fields: int = 0
    num_unknown_events: int = 0
