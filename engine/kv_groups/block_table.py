"""The block tables of one running request, one per cache group.

Block i of a group covers the tokens from i * block_size on; the null block stands where the group
needs none. Tables are data: who allocates and when is decided in kv_cache_manager.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block import Block


@dataclass(slots=True)
class GroupTable:
    """Blocks of one group, in chain order.

    `num_skipped`: leading blocks that are not held any more. `num_queued`: hash units from the
    front that are committed, or queued to be when their step returns.
    """

    blocks: list[Block] = field(default_factory=list)
    num_skipped: int = 0
    num_queued: int = 0


@dataclass(slots=True, eq=False)
class RequestTable:
    """All blocks of one request; sizes in tokens unless named otherwise.

    `capacity`: tokens that every group has room for. `num_processed`: tokens whose step has
    returned; steps in flight may still read what lies before. `num_hashed`: hash units whose
    commits are queued. `num_shared`: where other requests may leave this one's chain, worth a
    state of its own. `has_reserve`: all blocks that it may ever hold at once are set aside for it;
    `num_reserved` of them are not held now.
    """

    groups: list[GroupTable]
    num_processed: int
    num_hashed: int
    num_shared: int
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
