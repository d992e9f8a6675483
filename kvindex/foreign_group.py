"""The blocks of one cache group of a foreign engine, and which of them are credited.

Blocks form trees: one is credited while it and all blocks before it are held. A group of which
any block may be used without those before it puts every block in a tree of its own. It knows no
events and computes no hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvindex.events import WireHash
from kvindex.foreign_chain import ChainPosition
from kvindex.hashing import BlockHash
from kvindex.index import OpKind, Tier

Change = tuple[OpKind, Tier, list[bytes]]


@dataclass(slots=True)
class ForeignBlock:
    """One block of the engine. `hashes` are the pool blocks that it is credited with.

    It stays while a copy is held, or while a child is known. `is_credited`: it is held, and so are
    all blocks before it.
    """

    parent: WireHash | None
    position: ChainPosition
    hashes: tuple[BlockHash, ...]
    copies: Counter[Tier] = field(default_factory=Counter)
    children: set[WireHash] = field(default_factory=set)
    is_credited: bool = False


class ForeignGroup:
    """The blocks of one group by the engine's names for them."""

    def __init__(self) -> None:
        self._blocks: dict[WireHash, ForeignBlock] = {}
        self._credits: Counter[tuple[Tier, BlockHash]] = Counter()
        self._changes: list[Change] = []

    def __len__(self) -> int:
        """Return how many blocks are known, held or waiting for their parents."""
        return len(self._blocks)

    def get(self, name: WireHash) -> ForeignBlock | None:
        """Return a block that is known."""
        return self._blocks.get(name)

    def add(
        self,
        name: WireHash,
        parent: WireHash | None,
        position: ChainPosition,
        hashes: tuple[BlockHash, ...],
    ) -> ForeignBlock:
        """Take in a block, of which no copy is held yet; a parent must be known."""
        block = self._blocks[name] = ForeignBlock(parent, position, hashes)
        if parent is not None:
            self._blocks[parent].children.add(name)
        return block

    def store(self, block: ForeignBlock, tier: Tier) -> None:
        """Count a copy in."""
        block.copies[tier] += 1
        if block.copies[tier] == 1:
            self._credit_if_due(block, tier)

    def remove(self, name: WireHash, tier: Tier) -> None:
        """Count a copy out; what was never announced, or could not be retold, changes nothing."""
        block = self._blocks.get(name)
        if block is None or not block.copies[tier]:
            return
        block.copies[tier] -= 1
        if block.copies[tier]:
            return
        del block.copies[tier]
        if block.is_credited:
            self._change("removed", block, tier)
        if not block.copies:
            self._withdraw(block)
            self._forget(name, block)

    def clear(self) -> None:
        """Forget every block; nothing is told of it."""
        self._blocks.clear()
        self._credits.clear()
        self._changes.clear()

    def credited(self) -> dict[Tier, list[bytes]]:
        """Return everything that is credited, by tier."""
        held: dict[Tier, list[bytes]] = {}
        for tier, block_hash in self._credits:
            held.setdefault(tier, []).append(block_hash)
        return held

    def take_changes(self) -> list[Change]:
        """Return what has changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _credit_if_due(self, block: ForeignBlock, tier: Tier) -> None:
        """Credit a block that has just come to a tier, and what was waiting for it."""
        if block.is_credited:
            self._change("stored", block, tier)
            return
        before = None if block.parent is None else self._blocks[block.parent]
        if before is not None and not before.is_credited:
            return
        for follower in self._held_chain(block):
            follower.is_credited = True
            for its_tier in follower.copies:
                self._change("stored", follower, its_tier)

    def _withdraw(self, block: ForeignBlock) -> None:
        """Take credit from a block that is gone and from all behind it: they cannot be hit."""
        if not block.is_credited:
            return
        block.is_credited = False
        for child in list(self._children(block)):
            for follower in self._held_chain(child):
                follower.is_credited = False
                for tier in follower.copies:
                    self._change("removed", follower, tier)

    def _held_chain(self, block: ForeignBlock) -> Iterator[ForeignBlock]:
        """Yield a block and those behind it, as far as they are held, parents first."""
        waiting = [block] if block.copies else []
        while waiting:
            found = waiting.pop()
            yield found
            waiting += [child for child in self._children(found) if child.copies]

    def _children(self, block: ForeignBlock) -> Iterator[ForeignBlock]:
        return (self._blocks[name] for name in block.children)

    def _forget(self, name: WireHash, block: ForeignBlock) -> None:
        """Drop a block that nobody needs any more, and parents that were kept for its sake."""
        while not block.copies and not block.children:
            del self._blocks[name]
            if block.parent is None:
                return
            before = self._blocks[block.parent]
            before.children.discard(name)
            name, block = block.parent, before

    def _change(self, kind: OpKind, block: ForeignBlock, tier: Tier) -> None:
        """Count a block in or out; the index hears of a pool block's first and last credit.

        Two blocks of an engine may end in the same pool block, where their sizes differ.
        """
        step = 1 if kind == "stored" else -1
        changed: list[bytes] = []
        for block_hash in block.hashes:
            key = (tier, block_hash)
            count = self._credits[key] + step
            if count:
                self._credits[key] = count
            else:
                del self._credits[key]
            if count == (1 if kind == "stored" else 0):
                changed.append(block_hash)
        if not self._changes or self._changes[-1][:2] != (kind, tier):
            self._changes.append((kind, tier, []))
        self._changes[-1][2].extend(changed)
