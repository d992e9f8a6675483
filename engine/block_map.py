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
    """Finds the blocks of a tier by (group, hash) and records events under its `medium`."""

    def __init__(self, log: EventLog, *, medium: str, num_groups: int) -> None:
        self._log = log
        self._medium = medium
        self._copies: list[dict[BlockHash, list[Block]]] = [{} for _ in range(num_groups)]

    @property
    def num_groups(self) -> int:
        """Cache groups that share the tier."""
        return len(self._copies)

    @property
    def num_hashes(self) -> int:
        """Distinct (group, hash) keys that a look-up can find."""
        return sum(map(len, self._copies))

    def hashes(self, group: int) -> Iterable[BlockHash]:
        """List every hash that a look-up in a group can find, in no particular order."""
        return self._copies[group].keys()

    def __iter__(self) -> Iterator[tuple[int, BlockHash]]:
        """List every (group, hash) that a look-up can find, in no particular order."""
        for group, copies in enumerate(self._copies):
            for block_hash in copies:
                yield group, block_hash

    def copies(self, block_hash: BlockHash, group: int) -> Sequence[Block]:
        """Return every block of a group that holds the hash."""
        return self._copies[group].get(block_hash, ())

    def get(self, block_hash: BlockHash, group: int) -> Block | None:
        """Return a block that holds the hash, one in use if there is one; O(copies)."""
        copies = self._copies[group].get(block_hash)
        return preferred(copies) if copies is not None else None

    def get_leading(self, hashes: Iterable[BlockHash], group: int) -> list[Block]:
        """Return blocks that hold the hashes, in order, up to the first that nobody holds."""
        get = self._copies[group].get
        found: list[Block] = []
        for block_hash in hashes:
            copies = get(block_hash)
            if copies is None:
                break
            found.append(copies[0] if len(copies) == 1 else preferred(copies))
        return found

    def add(self, block: Block, block_hash: BlockHash, parent_hash: BlockHash | None) -> None:
        """Make a block findable under one more hash, the next of its hash units.

        `parent_hash` is the hash of the unit before; None means that there is none.
        """
        if block.block_hash is None:
            block.parent_hash = parent_hash
        else:
            assert block.block_hash == parent_hash, f"{block} is committed twice"
            block.inner_hashes = [*(block.inner_hashes or ()), block.block_hash]
        block.block_hash = block_hash
        of_group = self._copies[block.group]
        copies = of_group.get(block_hash)
        if copies is not None:
            copies.append(block)
            return
        of_group[block_hash] = [block]
        self._log.stored(
            block_hash,
            parent_hash,
            group=block.group,
            medium=self._medium,
            lora_name=block.lora_name,
        )

    def add_all(self, block: Block, like: Block) -> None:
        """Make a block findable under every hash of another, whose contents it holds."""
        parent_hash = like.parent_hash
        block.lora_name = like.lora_name
        for block_hash in like.hashes:
            self.add(block, block_hash, parent_hash)
            parent_hash = block_hash

    def forget(self, block: Block) -> None:
        """Drop every hash of a block, deepest first."""
        assert block.block_hash is not None
        self._forget_one(block, block.block_hash)
        if block.inner_hashes is not None:
            for block_hash in reversed(block.inner_hashes):
                self._forget_one(block, block_hash)
        block.forget_hashes()

    def clear(self) -> None:
        """Drop everything, without an event; the caller resets the blocks and announces it."""
        for copies in self._copies:
            copies.clear()

    def _forget_one(self, block: Block, block_hash: BlockHash) -> None:
        of_group = self._copies[block.group]
        copies = of_group[block_hash]
        if len(copies) > 1:
            copies.remove(block)
            return
        assert copies[0] is block, f"{block} is not known by what it holds"
        del of_group[block_hash]
        self._log.removed(block_hash, group=block.group, medium=self._medium)


def preferred(copies: Sequence[Block]) -> Block:
    """Return a copy in use if there is one; O(copies)."""
    return next((block for block in copies if block.ref_cnt), copies[0])
