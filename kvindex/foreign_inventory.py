"""What a foreign engine holds, retold in the hashes of a pool: a pure mirror of its KV events.

A foreign engine hashes as it likes, in blocks of its own size. Its events carry the token ids, so
each of its blocks is hashed again by the pool's scheme; its own hashes only name blocks. What
comes out is prefix-closed: a block is credited while it and all blocks before it are held. It
knows no sockets and no sequence numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvindex.event_stream import tier_of_medium
from kvindex.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireHash,
)
from kvindex.foreign_keys import BlockKeys, KeysUnreadableError, read_keys
from kvindex.hashing import Adapter, BlockHash, HashScheme, extra_keys, hash_block, root_hash
from kvindex.index import IndexOp, OpKind, Tier


@dataclass(slots=True)
class ForeignCounters:
    """What was met and could not be credited; the numbers only grow.

    `num_orphans`: blocks behind one that was never announced. `num_unreadable`: blocks whose
    extra keys cannot be retold (images, prompt embeddings, an unknown adapter).
    `num_other_groups`: events of cache groups beyond the first. `num_masked`: events that tell
    tokens and hashes which do not pair up. `num_without_keys`: events that carry no extra keys.
    """

    num_orphans: int = 0
    num_unreadable: int = 0
    num_other_groups: int = 0
    num_masked: int = 0
    num_without_keys: int = 0


@dataclass(slots=True)
class _Position:
    """Where the pool's chain stands behind a foreign block.

    `parent` is the hash of the last full pool block, None before the first; `rest` are the tokens
    since, fewer than a pool block holds. `salt` waits for the first pool block to be full.
    """

    parent: BlockHash | None = None
    rest: tuple[int, ...] = ()
    salt: str | None = None


@dataclass(slots=True)
class _Block:
    """One block of the engine. `hashes` are the pool blocks that end inside it.

    It stays while a copy is held, or while a child is known. `is_credited`: it is held, and so are
    all blocks before it.
    """

    parent: WireHash | None
    position: _Position
    hashes: tuple[BlockHash, ...]
    copies: Counter[Tier] = field(default_factory=Counter)
    children: set[WireHash] = field(default_factory=set)
    is_credited: bool = False


class ForeignInventory:
    """The blocks of one foreign engine core, and what the index is to be told of them.

    `adapters` by name: hashes of the pool cover the path of an adapter, events only its name.
    `block_size` is the engine's own, None until it has told.
    """

    def __init__(
        self, scheme: HashScheme, *, adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        self.block_size: int | None = None
        self.counters = ForeignCounters()
        self._scheme = scheme
        self._root = root_hash(scheme)
        self._adapters = adapters or {}
        self._blocks: dict[WireHash, _Block] = {}
        self._credits: Counter[tuple[Tier, BlockHash]] = Counter()
        self._changes: list[tuple[OpKind, Tier, list[bytes]]] = []

    @property
    def num_blocks(self) -> int:
        """How many blocks of the engine are known, held or waiting for their parents."""
        return len(self._blocks)

    @property
    def limitation(self) -> str | None:
        """Why what is credited may differ from what the engine would hit, None when it does not."""
        if self.counters.num_without_keys:
            return "its events carry no extra keys: cache salts cannot be told apart"
        if self.counters.num_other_groups:
            return "it has several cache groups, of which only the first is followed"
        return None

    def apply(self, batch: EventBatch) -> tuple[IndexOp, ...]:
        """Take the events of a batch in order; return what changes in the index.

        Raises ValueError for tokens that are none; then `clear` it.
        """
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                self._changes.append(("cleared", "gpu", []))
            elif event.group_idx:
                self.counters.num_other_groups += 1
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                self._removed(event)
        changes, self._changes = self._changes, []
        return tuple(
            IndexOp(kind=kind, hashes=tuple(hashes), tier=tier)
            for kind, tier, hashes in changes
            if hashes or kind == "cleared"
        )

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        self._credits.clear()
        self._changes.clear()

    def snapshot(self) -> list[IndexOp]:
        """Return everything that is credited, one operation for each tier."""
        held: dict[Tier, list[bytes]] = {}
        for tier, block_hash in self._credits:
            held.setdefault(tier, []).append(block_hash)
        return [
            IndexOp(kind="stored", hashes=tuple(hashes), tier=tier) for tier, hashes in held.items()
        ]

    # Events

    def _stored(self, event: BlockStored) -> None:
        tier = tier_of_medium(event.medium)
        if tier is None:
            return
        size, hashes = event.block_size, event.block_hashes
        if size < 1 or len(event.token_ids) != len(hashes) * size:
            self.counters.num_masked += 1
            return
        self.block_size = size
        if event.extra_keys is None:
            self.counters.num_without_keys += 1
        parent = event.parent_block_hash
        for i, name in enumerate(hashes):
            block = self._blocks.get(name)
            if block is None:
                tokens = event.token_ids[i * size : (i + 1) * size]
                block = self._add(name, parent, tokens, event, i)
            if block is None:
                # What follows hangs on it, and has no place in the chain either.
                self.counters.num_orphans += len(hashes) - i - 1
                return
            block.copies[tier] += 1
            if block.copies[tier] == 1:
                self._credit_if_due(block, tier)
            parent = name

    def _add(
        self,
        name: WireHash,
        parent: WireHash | None,
        tokens: Sequence[int],
        event: BlockStored,
        i: int,
    ) -> _Block | None:
        """Give a new block its place in the pool's chain; None when it has none."""
        before = None if parent is None else self._blocks.get(parent)
        if parent is not None and before is None:
            self.counters.num_orphans += 1
            return None
        try:
            keys = read_keys(event, i, self._adapters, is_first=parent is None)
        except KeysUnreadableError:
            self.counters.num_unreadable += 1
            return None
        start = before.position if before is not None else _Position(salt=keys.salt)
        position, hashes = self._extend(start, tokens, keys)
        block = self._blocks[name] = _Block(parent, position, hashes)
        if before is not None:
            before.children.add(name)
        return block

    def _extend(
        self, start: _Position, tokens: Sequence[int], keys: BlockKeys
    ) -> tuple[_Position, tuple[BlockHash, ...]]:
        """Hash the pool blocks that become full with these tokens."""
        size, algorithm = self._scheme.block_size, self._scheme.algorithm
        waiting = (*start.rest, *tokens)
        parent, hashes = start.parent, []
        num_full = len(waiting) // size
        for first in range(0, num_full * size, size):
            extra = extra_keys(
                first_block=parent is None, cache_salt=start.salt, adapter=keys.adapter
            )
            above = self._root if parent is None else parent
            parent = hash_block(algorithm, above, waiting[first : first + size], extra)
            hashes.append(parent)
        salt = start.salt if parent is None else None
        return _Position(parent, waiting[num_full * size :], salt), tuple(hashes)

    def _removed(self, event: BlockRemoved) -> None:
        tier = tier_of_medium(event.medium)
        if tier is None:
            return
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None or not block.copies[tier]:
                continue  # It was never announced to us, or could not be retold.
            block.copies[tier] -= 1
            if block.copies[tier]:
                continue
            del block.copies[tier]
            if block.is_credited:
                self._change("removed", block, tier)
            if not block.copies:
                self._withdraw(block)
                self._forget(name, block)

    # Credit

    def _credit_if_due(self, block: _Block, tier: Tier) -> None:
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

    def _withdraw(self, block: _Block) -> None:
        """Take credit from a block that is gone and from all behind it: they cannot be hit."""
        if not block.is_credited:
            return
        block.is_credited = False
        for child in list(self._children(block)):
            for follower in self._held_chain(child):
                follower.is_credited = False
                for tier in follower.copies:
                    self._change("removed", follower, tier)

    def _held_chain(self, block: _Block) -> Iterator[_Block]:
        """Yield a block and those behind it, as far as they are held, parents first."""
        waiting = [block] if block.copies else []
        while waiting:
            found = waiting.pop()
            yield found
            waiting += [child for child in self._children(found) if child.copies]

    def _children(self, block: _Block) -> Iterator[_Block]:
        return (self._blocks[name] for name in block.children)

    def _forget(self, name: WireHash, block: _Block) -> None:
        """Drop a block that nobody needs any more, and parents that were kept for its sake."""
        while not block.copies and not block.children:
            del self._blocks[name]
            if block.parent is None:
                return
            before = self._blocks[block.parent]
            before.children.discard(name)
            name, block = block.parent, before

    def _change(self, kind: OpKind, block: _Block, tier: Tier) -> None:
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
