"""Which blocks of one tier hold which hash.

A hash means something only together with its cache group. Several blocks may hold the same one:
its first copy is announced as stored, its last one as removed. It decides nothing about blocks,
and never looks at whether they are free except to prefer one in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.block import Block
from engine.event_log import EventLog
from kvindex.hashing import BlockHash


class BlockMap:
    """Finds the blocks of a tier by (group, hash) and records events under its `medium`.

    The first copy of a hash and the further ones are kept apart: hardly any hash has two, and a
    look-up that need not expect any is one of a dictionary.
    """

    def __init__(self, log: EventLog, *, medium: str, num_groups: int) -> None:
        self._log = log
        self._medium = medium
        self._first: list[dict[BlockHash, Block]] = [{} for _ in range(num_groups)]
        self._further: list[dict[BlockHash, list[Block]]] = [{} for _ in range(num_groups)]

    @property
    def num_groups(self) -> int:
        """Cache groups that share the tier."""
        return len(self._first)

    @property
    def num_hashes(self) -> int:
        """Distinct (group, hash) keys that a look-up can find."""
        return sum(map(len, self._first))

    @property
    def has_copies(self) -> bool:
        """Whether any hash is held by more than one block."""
        return any(self._further)

    def hashes(self, group: int) -> Iterable[BlockHash]:
        """List every hash that a look-up in a group can find, in no particular order."""
        return self._first[group].keys()

    def __iter__(self) -> Iterator[tuple[int, BlockHash]]:
        """List every (group, hash) that a look-up can find, in no particular order."""
        for group, first in enumerate(self._first):
            for block_hash in first:
                yield group, block_hash

    def copies(self, block_hash: BlockHash, group: int) -> Sequence[Block]:
        """Return every block of a group that holds the hash."""
        first = self._first[group].get(block_hash)
        return () if first is None else (first, *self._further[group].get(block_hash, ()))

    def get(self, block_hash: BlockHash, group: int) -> Block | None:
        """Return a block that holds the hash, one in use if there is one; O(copies)."""
        first = self._first[group].get(block_hash)
        if first is None or block_hash not in self._further[group]:
            return first
        return preferred((first, *self._further[group][block_hash]))

    def get_leading(self, hashes: Sequence[BlockHash], group: int) -> list[Block]:
        """Return blocks that hold the hashes, in order, up to the first that nobody holds."""
        found: list[Block] = []
        for block in map(self._first[group].get, hashes):
            if block is None:
                break
            found.append(block)
        further = self._further[group]
        if further:
            return [
                preferred((block, *further.get(block_hash, ())))
                for block, block_hash in zip(found, hashes, strict=False)
            ]
        return found

    def add(
        self,
        blocks: Sequence[Block],
        hashes: Sequence[BlockHash],
        parent_hash: BlockHash | None,
        *,
        lora_name: str | None = None,
    ) -> None:
        """Make blocks of one group findable under consecutive hashes, one each.

        Each is the next of its block's hash units; of several units, a block is listed once for
        each. `parent_hash` is the hash of the unit before the first; None means that there is none.
        """
        before = parent_hash
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.block_hash is None:
                block.parent_hash = before
            else:
                assert block.block_hash == before, f"{block} is committed twice"
                block.inner_hashes = [*(block.inner_hashes or ()), block.block_hash]
            block.block_hash = before = block_hash
            block.lora_name = lora_name
        group = blocks[0].group
        first = self._first[group]
        if first.keys().isdisjoint(hashes):
            first.update(zip(hashes, blocks, strict=True))
            self._announce(hashes, parent_hash, group, lora_name)
            return
        new, before_new = list[BlockHash](), parent_hash
        for block, block_hash in zip(blocks, hashes, strict=True):
            if first.setdefault(block_hash, block) is block:
                new.append(block_hash)
                continue
            self._further[group].setdefault(block_hash, []).append(block)
            self._announce(new, before_new, group, lora_name)
            new, before_new = [], block_hash
        self._announce(new, before_new, group, lora_name)

    def add_all(self, block: Block, like: Block) -> None:
        """Make a block findable under every hash of another, whose contents it holds."""
        hashes = like.hashes
        self.add([block] * len(hashes), hashes, like.parent_hash, lora_name=like.lora_name)

    def forget(self, blocks: Sequence[Block]) -> None:
        """Drop every hash of blocks, one block after the other, the deepest of each first."""
        group, gone = blocks[0].group, list[BlockHash]()
        first, further = self._first[group], self._further[group]
        for block in blocks:
            if block.group != group:
                self._announce_loss(gone, group)
                group, gone = block.group, []
                first, further = self._first[group], self._further[group]
            block_hash = block.block_hash
            assert block_hash is not None, f"{block} holds nothing to forget"
            if block.inner_hashes is not None or block_hash in further:
                gone += self._forget_each(block)
                block.forget_hashes()
                continue
            known = first.pop(block_hash)
            assert known is block, f"{block} is not known by what it holds"
            gone.append(block_hash)
            # as forget_hashes does, without a call for each
            block.block_hash = block.parent_hash = block.lora_name = None
            block.was_hit = False
        self._announce_loss(gone, group)

    def clear(self) -> None:
        """Drop everything, without an event; the caller resets the blocks and announces it."""
        for first, further in zip(self._first, self._further, strict=True):
            first.clear()
            further.clear()

    def _forget_each(self, block: Block) -> list[BlockHash]:
        """Drop every hash of a block, deepest first; return those that no other block holds."""
        first, further = self._first[block.group], self._further[block.group]
        gone = []
        for block_hash in reversed(block.hashes):
            copies = [first[block_hash], *further.pop(block_hash, ())]
            copies.remove(block)
            if not copies:
                del first[block_hash]
                gone.append(block_hash)
                continue
            first[block_hash] = copies.pop(0)
            if copies:
                further[block_hash] = copies
        return gone

    def _announce(
        self,
        hashes: Sequence[BlockHash],
        parent_hash: BlockHash | None,
        group: int,
        lora_name: str | None,
    ) -> None:
        if hashes:
            self._log.stored(
                hashes, parent_hash, group=group, medium=self._medium, lora_name=lora_name
            )

    def _announce_loss(self, hashes: list[BlockHash], group: int) -> None:
        if hashes:
            self._log.removed(hashes, group=group, medium=self._medium)


def preferred(copies: Sequence[Block]) -> Block:
    """Return a copy in use if there is one; O(copies)."""
    return next((block for block in copies if block.ref_cnt), copies[0])
