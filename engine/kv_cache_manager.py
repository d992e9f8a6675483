"""Block tables of running requests over one pool: hits, allocation and two-phase commit.

A hash becomes findable only after the step that wrote its block has returned. Until then it is
*pending*: a request that needs it can wait for its writer instead of computing it again. It knows
no queues and no budgets (scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block import Block
from engine.block_pool import BlockPool
from engine.request import Request
from kvindex.hashing import BlockHash


@dataclass(slots=True)
class BlockTable:
    """The blocks of one running request, in chain order, and how many of them are committed.

    `num_queued` blocks from the front are committed or queued to be when their step returns.
    """

    blocks: list[Block] = field(default_factory=list)
    num_queued: int = 0


@dataclass(slots=True, frozen=True)
class PendingCommit:
    """A block that the step in flight completes.

    Keyed by allocation generation: when the block was given back meanwhile, nothing is committed.
    """

    block: Block
    generation: int
    block_hash: BlockHash
    parent_hash: BlockHash | None


class KVCacheManager:
    """Full-attention KV cache over one block pool."""

    def __init__(self, pool: BlockPool, *, enable_caching: bool = True) -> None:
        self.pool = pool
        self.enable_caching = enable_caching
        self.tables: dict[str, BlockTable] = {}
        self._commits: dict[int, list[PendingCommit]] = {}
        self._writers: dict[BlockHash, str] = {}

    def find_hit(self, request: Request) -> list[Block]:
        """Return the cached blocks of the longest known prefix; changes nothing.

        At least the last known token is left to compute, because its logits are needed.
        """
        if not self.enable_caching:
            return []
        limit = (request.num_tokens - 1) // self.pool.block_size
        hit: list[Block] = []
        for block_hash in request.chain.hashes[:limit]:
            block = self.pool.get_cached(block_hash)
            if block is None:
                break
            hit.append(block)
        return hit

    def awaited(self, request: Request, num_hit_blocks: int) -> BlockHash | None:
        """Return the next hash after a hit if a running request is about to commit it.

        The block of the last known token is never worth waiting for: it must be computed anyway.
        """
        limit = (request.num_tokens - 1) // self.pool.block_size
        if not self.enable_caching or num_hit_blocks >= limit:
            return None
        block_hash = request.chain.hashes[num_hit_blocks]
        return block_hash if block_hash in self._writers else None

    def is_pending(self, block_hash: bytes) -> bool:
        """Tell whether some running request is still about to commit the hash."""
        return block_hash in self._writers

    def can_fit(self, hit: list[Block], *, num_tokens: int, spare_blocks: int) -> bool:
        """Tell whether `num_tokens` fit after a hit, with `spare_blocks` left; changes nothing."""
        needed = self._num_blocks(num_tokens) - len(hit)
        evictable_hits = sum(1 for block in hit if block.ref_cnt == 0)
        return needed + evictable_hits + spare_blocks <= self.pool.num_free

    def admit(self, request: Request, hit: list[Block]) -> None:
        """Open a block table that starts with the hit and claim the hashes to be written."""
        assert request.request_id not in self.tables, f"{request.request_id} has blocks already"
        self.pool.touch(hit)
        self.tables[request.request_id] = BlockTable(list(hit), num_queued=len(hit))
        if self.enable_caching:
            for block_hash in request.chain.hashes[len(hit) :]:
                self._writers.setdefault(block_hash, request.request_id)

    def extend(self, request: Request, num_tokens: int) -> list[Block] | None:
        """Grow the table to hold `num_tokens` tokens; None, with nothing changed, if it cannot."""
        table = self.tables[request.request_id]
        needed = self._num_blocks(num_tokens) - len(table.blocks)
        if needed <= 0:
            return []
        if needed > self.pool.num_free:
            return None
        new = self.pool.allocate(needed)
        table.blocks.extend(new)
        return new

    def queue_commits(self, request: Request, step: int) -> None:
        """Note the blocks that are full once `step` has computed up to `num_computed_tokens`."""
        if not self.enable_caching:
            return
        table, hashes = self.tables[request.request_id], request.chain.hashes
        num_full = min(request.num_computed_tokens // self.pool.block_size, len(hashes))
        commits = self._commits.setdefault(step, [])
        for i in range(table.num_queued, num_full):
            block = table.blocks[i]
            parent = hashes[i - 1] if i else None
            commits.append(PendingCommit(block, block.generation, hashes[i], parent))
        table.num_queued = max(table.num_queued, num_full)

    def commit_step(self, step: int) -> None:
        """Make findable what `step` has written, except blocks that were given back meanwhile."""
        for commit in self._commits.pop(step, ()):
            if commit.block.generation != commit.generation:
                continue
            self.pool.commit(commit.block, commit.block_hash, commit.parent_hash)
            self._writers.pop(commit.block_hash, None)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, deepest first, and its claims; a no-op without any."""
        table = self.tables.pop(request.request_id, None)
        if table is None:
            return
        self.pool.free(table.blocks[::-1])
        for block_hash in request.chain.hashes:
            if self._writers.get(block_hash) == request.request_id:
                del self._writers[block_hash]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)
