"""Finds the prefix that all cache groups can serve from the pool.

Which lengths are hits is decided by kvindex/hit_rule.py, the same rule that the index predicts
with; this maps its answer to blocks. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block import Block
from engine.block_pool import BlockPool
from engine.kv_groups.group import KVGroup
from kvindex.hashing import BlockHash
from kvindex.hit_rule import GroupRule, HitRule


@dataclass(slots=True)
class PrefixHit:
    """A cached prefix of `num_tokens`.

    `blocks`, per group: the blocks that can be read in place, null where the group reads none; a
    group that takes no part in hits has an empty list. `tails`, per group: a block of which only
    the first part belongs to the prefix, so that it must be copied. `num_shared`: tokens that
    some request has computed before, although not every group still holds what it takes.
    """

    num_tokens: int
    blocks: list[list[Block]]
    tails: list[Block | None]
    num_shared: int


@dataclass(slots=True)
class _CachedChain:
    """What one group holds of one chain; remembers the blocks it found from the front."""

    pool: BlockPool
    group: KVGroup
    hashes: Sequence[BlockHash]
    leading: list[Block] = field(default_factory=list)

    def num_leading(self, limit: int) -> int:
        stride = self.group.block_size // self.pool.block_size
        hashes = self.hashes[stride - 1 : limit * stride : stride]
        self.leading = self.pool.get_leading(hashes, self.group.index)
        return len(self.leading)

    def has(self, position: int) -> bool:
        return self.find(position) is not None

    def find(self, position: int) -> Block | None:
        return self.pool.get_cached(self.hashes[position], self.group.index)


class HitCoordinator:
    """Looks up prefixes over one pool; a group that is never cached takes no part."""

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup]) -> None:
        self._pool = pool
        self._groups = groups
        self._cacheable = [group for group in groups if group.rule is not None]
        rules = [group.rule for group in groups if group.rule is not None]
        self._rule = HitRule(rules, hash_block_size=pool.block_size)

    @property
    def granularity(self) -> int:
        """Every hit is a multiple of so many tokens."""
        return self._rule.granularity

    def no_hit(self) -> PrefixHit:
        """Return the hit of nothing."""
        count = len(self._groups)
        return PrefixHit(0, [[] for _ in range(count)], [None] * count, 0)

    def find(self, hashes: Sequence[BlockHash], *, max_tokens: int) -> PrefixHit:
        """Return the longest hit of at most `max_tokens` tokens of the chain."""
        chains = [_CachedChain(self._pool, group, hashes) for group in self._cacheable]
        num_tokens = self._rule.longest(chains, max_tokens=max_tokens)
        hit = self.no_hit()
        hit.num_tokens = hit.num_shared = num_tokens
        for chain in chains:
            group, rule = chain.group, chain.group.rule
            assert rule is not None
            if rule.kind == "full":
                hit.num_shared = max(hit.num_shared, len(chain.leading) * group.block_size)
            self._take(hit, chain, rule)
        return hit

    def _take(self, hit: PrefixHit, chain: _CachedChain, rule: GroupRule) -> None:
        """Add the blocks of one group, which the rule has found to be there."""
        size, unit, index = rule.block_size, self._pool.block_size, chain.group.index
        num_whole, rest = divmod(hit.num_tokens, size)
        num_skipped = rule.num_skipped_tokens(hit.num_tokens)
        if rule.kind == "full":
            hit.blocks[index] = chain.leading[:num_whole]
        else:
            num_null = min(num_skipped // size, num_whole)
            blocks = hit.blocks[index] = [self._pool.null_block] * num_null
            for i in range(num_null, num_whole):
                block = chain.find((i + 1) * size // unit - 1)
                assert block is not None
                blocks.append(block)
        if rest and num_skipped < hit.num_tokens:
            hit.tails[index] = chain.find(hit.num_tokens // unit - 1)
