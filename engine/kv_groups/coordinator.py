"""Finds the prefix that all cache groups can serve from the pool.

Which lengths are hits is decided by kvindex/hit_rule.py, the same rule that the index predicts
with; this maps its answer to blocks. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block import Block
from engine.block_map import BlockMap
from engine.block_pool import BlockPool
from engine.kv_groups.group import KVGroup
from kvindex.hashing import BlockHash
from kvindex.hit_rule import CacheLayout, GroupRule


@dataclass(slots=True)
class PrefixHit:
    """A cached prefix of `num_tokens`.

    `blocks`, per group: the blocks that can be read in place, null where the group reads none; a
    group that takes no part in hits has an empty list. `tails`, per group: a block of which only
    the first part belongs to the prefix, so that it must be copied. `num_shared`: tokens that
    some request has computed before, although not every group still holds what it takes.
    Blocks and tails that are only in the host tier are listed in `on_host` too: they must be
    brought back first.
    """

    num_tokens: int
    blocks: list[list[Block]]
    tails: list[Block | None]
    num_shared: int
    on_host: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class _CachedChain:
    """What one group holds of one chain; remembers the blocks it found from the front.

    A block is taken from the first of the `tiers` that holds it.
    """

    tiers: Sequence[BlockMap]
    group: KVGroup
    hash_block_size: int
    hashes: Sequence[BlockHash]
    leading: list[Block] = field(default_factory=list)

    def num_leading(self, limit: int) -> int:
        stride = self.group.block_size // self.hash_block_size
        hashes = self.hashes[stride - 1 : limit * stride : stride]
        self.leading = self.tiers[0].get_leading(hashes, self.group.index)
        for tier in self.tiers[1:]:
            # The pool is prefix-closed: what it has lost of a chain, it has lost to the end.
            self.leading += tier.get_leading(hashes[len(self.leading) :], self.group.index)
        return len(self.leading)

    def num_known_tokens(self, max_tokens: int) -> int:
        """Return how far the chain is held without a gap, in whole hash units.

        Called after `num_leading`; the block behind those may be held in part.
        """
        num_units = len(self.leading) * (self.group.block_size // self.hash_block_size)
        most = min(len(self.hashes), max_tokens // self.hash_block_size)
        while num_units < most and self.has(num_units):
            num_units += 1
        return num_units * self.hash_block_size

    def has(self, position: int) -> bool:
        return self.find(position) is not None

    def find(self, position: int) -> Block | None:
        for tier in self.tiers:
            block = tier.get(self.hashes[position], self.group.index)
            if block is not None:
                return block
        return None


class HitCoordinator:
    """Looks up prefixes over one pool and its host tier; groups never cached take no part.

    `layout` is what an index needs to predict the same hits.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup]) -> None:
        self._pool = pool
        self._resident = (pool.map,)
        self._all_tiers = (pool.map,) if pool.host is None else (pool.map, pool.host.map)
        self._groups = groups
        self._cacheable = [group for group in groups if group.rule is not None]
        self.layout = CacheLayout(
            groups=tuple(group.rule for group in groups), hash_block_size=pool.block_size
        )
        self._rule = self.layout.rule()

    @property
    def granularity(self) -> int:
        """Every hit is a multiple of so many tokens."""
        return self._rule.granularity

    def no_hit(self) -> PrefixHit:
        """Return the hit of nothing."""
        count = len(self._groups)
        return PrefixHit(0, [[] for _ in range(count)], [None] * count, 0)

    def find(
        self, hashes: Sequence[BlockHash], *, max_tokens: int, resident_only: bool = False
    ) -> PrefixHit:
        """Return the longest hit of at most `max_tokens` tokens of the chain.

        With `resident_only`, what is only in the host tier does not count.
        """
        tiers = self._resident if resident_only else self._all_tiers
        unit = self._pool.block_size
        chains = [_CachedChain(tiers, group, unit, hashes) for group in self._cacheable]
        num_tokens = self._rule.longest(chains, max_tokens=max_tokens)
        hit = self.no_hit()
        hit.num_tokens = hit.num_shared = num_tokens
        for chain in chains:
            rule = chain.group.rule
            assert rule is not None
            if rule.kind == "full":
                hit.num_shared = max(hit.num_shared, chain.num_known_tokens(max_tokens))
            self._take(hit, chain, rule)
        if len(tiers) > 1:
            found = [block for blocks in hit.blocks for block in blocks]
            found += [tail for tail in hit.tails if tail is not None]
            hit.on_host = [block for block in found if block.on_host]
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
