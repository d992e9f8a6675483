"""The whole inventory of one engine at a step border, as the ingester loads it into an index.

It knows neither the engine that took it nor the index that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvindex.index import IndexOp


class SnapshotData(msgspec.Struct, frozen=True, kw_only=True):
    """Every cached block as of event batch `seq` (-1: none was published yet), all `stored`.

    `boot_ns` is the engine core's start, nanoseconds since the Unix epoch.
    """

    boot_ns: int
    seq: int
    ops: Sequence[IndexOp]
