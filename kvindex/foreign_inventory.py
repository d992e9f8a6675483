"""What a foreign engine holds, retold in the hashes of a pool: a pure mirror of its KV events.

A foreign engine hashes as it likes, in blocks of its own size. Its events carry the token ids, so
each of its blocks is hashed again by the pool's scheme; its own hashes only name blocks. What
comes out is prefix-closed in groups that read the whole past: a block is credited while it and all
blocks before it are held. In the other groups it is credited while it is held, under the hash at
its end, and the index applies the hit rule. It knows no sockets and no sequence numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvindex.event_stream import tier_of_medium
from kvindex.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireHash,
)
from kvindex.foreign_chain import ChainPosition, PoolChain
from kvindex.foreign_group import ForeignBlock, ForeignGroup
from kvindex.foreign_keys import KeysUnreadableError, read_keys
from kvindex.foreign_layout import GroupFacts, layout_of, trouble_of
from kvindex.hashing import Adapter, HashScheme
from kvindex.hit_rule import CacheLayout
from kvindex.index import IndexOp


@dataclass(slots=True)
class ForeignCounters:
    """What was met and could not be credited; the numbers only grow.

    `num_orphans`: blocks behind one that was never announced. `num_unreadable`: blocks whose
    extra keys cannot be retold (images, prompt embeddings, an unknown adapter).
    `num_other_groups`: events of cache groups that are not followed. `num_masked`: events that
    tell tokens and hashes which do not pair up, of blocks that no other group has told of.
    `num_without_keys`: events that carry no extra keys.
    """

    num_orphans: int = 0
    num_unreadable: int = 0
    num_other_groups: int = 0
    num_masked: int = 0
    num_without_keys: int = 0


class ForeignInventory:
    """The blocks of one foreign engine core, and what the index is to be told of them.

    `adapters` by name: hashes of the pool cover the path of an adapter, events only its name.
    `block_size` is that of the engine's first group, None until it has told. `layout` is what its
    events say of its groups; with another layout the index has to be told everything anew.
    """

    def __init__(
        self, scheme: HashScheme, *, adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        self.block_size: int | None = None
        self.layout: CacheLayout | None = None
        self.counters = ForeignCounters()
        self._chain = PoolChain(scheme)
        self._adapters = adapters or {}
        self._facts: dict[int, GroupFacts] = {}
        self._trouble: str | None = None
        self._groups: dict[int, ForeignGroup] = {}

    @property
    def num_blocks(self) -> int:
        """How many blocks of the engine are known, held or waiting for their parents."""
        return sum(len(group) for group in self._groups.values())

    @property
    def limitation(self) -> str | None:
        """Why what is credited may differ from what the engine would hit, None when it does not."""
        if self.counters.num_without_keys:
            return "its events carry no extra keys: cache salts cannot be told apart"
        return self._trouble

    def apply(self, batch: EventBatch) -> tuple[IndexOp, ...]:
        """Take the events of a batch in order; return what changes in the index.

        Raises ValueError for tokens that are none; then `clear` it.
        """
        ops: list[IndexOp] = []
        between: list[BlockStored | BlockRemoved] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                # What came before is gone, and nobody needs to hear of it.
                between.clear()
                self.clear()
                ops = [IndexOp(kind="cleared")]
            else:
                between.append(event)
                self._note(event)
        self._take(between)
        return (*ops, *self._changes())

    def clear(self) -> None:
        """Forget every block."""
        for group in self._groups.values():
            group.clear()

    def snapshot(self) -> list[IndexOp]:
        """Return everything that is credited, one operation for each group and tier."""
        return [
            IndexOp(kind="stored", hashes=tuple(hashes), tier=tier, group=index)
            for index, group in self._groups.items()
            if self._is_followed(index)
            for tier, hashes in group.credited().items()
        ]

    # Groups

    def _note(self, event: BlockStored | BlockRemoved) -> None:
        """Note what an event tells of its group; the layout follows from all of them."""
        if not isinstance(event, BlockStored) or tier_of_medium(event.medium) != "gpu":
            return
        index, facts = event.group_idx or 0, GroupFacts.of(event)
        if facts.block_size < 1 or self._facts.get(index) == facts:
            return
        self._facts[index] = facts
        self._trouble = trouble_of(self._facts, self._chain.block_size)
        self.layout = layout_of(self._facts, self._chain.block_size)
        for other, group in self._groups.items():
            if not self._is_followed(other):
                group.clear()

    def _is_followed(self, index: int) -> bool:
        return index == 0 or (self.layout is not None and index in self._facts)

    def _reads_all(self, index: int) -> bool:
        return index not in self._facts or self.layout is None or self._facts[index].reads_all

    # Events

    def _take(self, events: Iterable[BlockStored | BlockRemoved]) -> None:
        """Apply events, those of groups that read the whole past first.

        Where a block lies in the chain may be known by their blocks only.
        """
        for event in sorted(events, key=lambda event: not self._reads_all(event.group_idx or 0)):
            index = event.group_idx or 0
            if not self._is_followed(index):
                self.counters.num_other_groups += 1
            elif isinstance(event, BlockStored):
                self._stored(index, event)
            else:
                self._removed(index, event)

    def _stored(self, index: int, event: BlockStored) -> None:
        tier = tier_of_medium(event.medium)
        if tier is None:
            return
        size, hashes = event.block_size, event.block_hashes
        group = self._groups.setdefault(index, ForeignGroup())
        if size < 1 or len(event.token_ids) != len(hashes) * size:
            found = [block for name in hashes if (block := self._known(index, name)) is not None]
            self.counters.num_masked += len(found) < len(hashes)
            for block in found:
                group.store(block, tier)
            return
        if index == 0:
            self.block_size = size
        if event.extra_keys is None:
            self.counters.num_without_keys += 1
        parent = event.parent_block_hash
        for i, name in enumerate(hashes):
            block = self._known(index, name) or self._add(index, name, parent, event, i)
            if block is None:
                # What follows hangs on it, and has no place in the chain either.
                self.counters.num_orphans += len(hashes) - i - 1
                return
            group.store(block, tier)
            parent = name

    def _known(self, index: int, name: WireHash) -> ForeignBlock | None:
        """Return a block that the group has, or that another group's block says the place of."""
        block = self._groups[index].get(name)
        if block is None and not self._reads_all(index):
            position = self._position_of(name)
            return None if position is None else self._add_alone(index, name, position)
        return block

    def _add(
        self, index: int, name: WireHash, parent: WireHash | None, event: BlockStored, i: int
    ) -> ForeignBlock | None:
        """Give a new block its place in the pool's chain; None when it has none."""
        start = ChainPosition()
        if parent is not None:
            known = self._position_of(parent, index if self._reads_all(index) else None)
            if known is None:
                self.counters.num_orphans += 1
                return None
            start = known
        try:
            keys = read_keys(event, i, self._adapters, is_first=parent is None)
        except KeysUnreadableError:
            self.counters.num_unreadable += 1
            return None
        if parent is None:
            start = ChainPosition(salt=keys.salt)
        tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
        position, hashes = self._chain.extend(start, tokens, keys)
        if self._reads_all(index):
            return self._groups[index].add(name, parent, position, hashes)
        return self._add_alone(index, name, position)

    def _add_alone(
        self, index: int, name: WireHash, position: ChainPosition
    ) -> ForeignBlock | None:
        """Add a block that counts without those before it, under the hash at its end."""
        if position.parent is None or position.rest:
            self.counters.num_unreadable += 1
            return None
        return self._groups[index].add(name, None, position, (position.parent,))

    def _position_of(self, name: WireHash, index: int | None = None) -> ChainPosition | None:
        """Return where a block ends, by any group's block of this name or by that of one group."""
        groups = self._groups.values() if index is None else [self._groups[index]]
        for group in groups:
            block = group.get(name)
            if block is not None:
                return block.position
        return None

    def _removed(self, index: int, event: BlockRemoved) -> None:
        tier, group = tier_of_medium(event.medium), self._groups.get(index)
        if tier is None or group is None:
            return
        for name in event.block_hashes:
            group.remove(name, tier)

    def _changes(self) -> list[IndexOp]:
        return [
            IndexOp(kind=kind, hashes=tuple(hashes), tier=tier, group=index)
            for index, group in self._groups.items()
            for kind, tier, hashes in group.take_changes()
            if hashes
        ]
