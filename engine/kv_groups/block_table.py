"""The block tables of one running request, one per cache group.

Block i of a group covers the tokens from i * block_size on; the null block stands where the group
needs none. Tables are data: who allocates and when is decided in kv_cache_manager.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.block import Block
from kvindex.hashing import BlockHash


class LeftState(NamedTuple):
    """A state that a request leaves after its first `num_tokens` tokens, found under a hash.

    `generation` is that of the block while the request held it. `lasts`: others are likely to
    begin there, so it is not given up for a later one.
    """

    block: Block
    generation: int
    block_hash: BlockHash
    num_tokens: int
    lasts: bool

    @property
    def is_cached(self) -> bool:
        """Whether the block, given back or not, still holds this state where it can be found."""
        is_same = self.block.generation - self.generation <= 1
        return is_same and self.block.block_hash == self.block_hash


@dataclass(slots=True)
class GroupTable:
    """Blocks of one group, in chain order.

    `num_skipped`: leading blocks that are not held any more. `num_queued`: hash units from the
    front that are committed, or queued to be when their step returns. `states`: of a state group,
    what it has queued from the one on that was committed last.
    """

    blocks: list[Block] = field(default_factory=list)
    num_skipped: int = 0
    num_queued: int = 0
    states: list[LeftState] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RequestTable:
    """All blocks of one request; sizes in tokens unless named otherwise.

    `capacity`: tokens that every group has room for. `num_processed`: tokens whose step has
    returned; steps in flight may still read what lies before. `num_hashed`: hash units whose
    commits are queued. `partings`: after how many tokens other requests may leave this one's
    chain, which is worth a state. `has_reserve`: all blocks that it may ever hold at once are set
    aside for it; `num_reserved` of them are not held now.
    """

    groups: list[GroupTable]
    num_processed: int
    num_hashed: int
    partings: set[int]
    capacity: int = 0
    has_reserve: bool = False
    num_reserved: int = 0

    @property
    def num_held(self) -> int:
        """Blocks in use by this request."""
        return sum(1 for group in self.groups for block in group.blocks if block.block_id)

    @property
    def block_ids(self) -> list[list[int]]:
        """Block ids per group."""
        return [[block.block_id for block in group.blocks] for group in self.groups]


@dataclass(slots=True, frozen=True)
class Progress:
    """How far a request is when a step has returned, and what it has hashed on the way."""

    table: RequestTable
    num_computed_tokens: int
    hashes: Sequence[BlockHash]
