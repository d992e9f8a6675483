"""The KV events of one engine in the order in which they happened, over all tiers.

It only records: when a hash becomes findable, and when it is gone, is known to block_map.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvindex.hashing import BlockHash


class EventLog:
    """Collects events until they are taken; `block_size` is the number of tokens of a hash."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(
        self,
        hashes: Sequence[BlockHash],
        parent_hash: BlockHash | None,
        *,
        group: int,
        medium: str,
        lora_name: str | None = None,
    ) -> None:
        """Record a run of new hashes, joined to the run before it when it continues that run.

        A chain is of one adapter, `lora_name`, or of none, because its hashes cover that.
        """
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and last.block_hashes[-1] == parent_hash
            and last.group_idx == group
            and last.medium == medium
        ):
            last.block_hashes.extend(hashes)
            return
        self._events.append(
            BlockStored(
                block_hashes=[*hashes],
                parent_block_hash=parent_hash,
                token_ids=[],
                block_size=self._block_size,
                medium=medium,
                lora_name=lora_name,
                group_idx=group,
            )
        )

    def removed(self, hashes: Sequence[BlockHash], *, group: int, medium: str) -> None:
        """Record that the last copies of some hashes are gone from a medium."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group and last.medium == medium:
            last.block_hashes.extend(hashes)
            return
        self._events.append(BlockRemoved(block_hashes=[*hashes], medium=medium, group_idx=group))

    def cleared(self) -> None:
        """Record that nothing is cached any more, in any tier."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return what was recorded since the last call, in order."""
        events, self._events = self._events, []
        return events
