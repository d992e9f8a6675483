"""From a trace's block ids to hashes of engine blocks, once per request.

An id stands for its whole prefix, so any one-to-one naming keeps the prefix structure. Hashes are
8 bytes, the part that an index keeps. It knows neither caches nor time.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import cast

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import BlockHash


class BlockNames:
    """Names engine blocks of `block_size` tokens by trace blocks of `trace_block_size`.

    Equal (scope, id) give equal hashes, other pairs other ones; `fresh` never repeats. What has a
    name of a chain of ids is its beginning, because an id stands for all that is before it. Memory
    grows with the distinct ids of the trace, not with its length. Raises ConfigError when neither
    size divides the other.
    """

    def __init__(self, *, trace_block_size: int, block_size: int) -> None:
        if trace_block_size % block_size and block_size % trace_block_size:
            raise ConfigError(
                f"block size {block_size}: expected a divisor or a multiple of the trace's, "
                f"which is {trace_block_size}"
            )
        self._units = max(1, trace_block_size // block_size)
        self._group = max(1, block_size // trace_block_size)
        self._fresh = cast("Iterator[BlockHash]", map(struct.Struct(">Q").pack, itertools.count()))
        self._named: dict[Hashable, dict[int, BlockHash]] = {}

    def chain(self, scope: Hashable, ids: Sequence[int], *, limit: int) -> list[BlockHash]:
        """Return the hashes of the first `limit` engine blocks of a chain of ids.

        Blocks beyond the last id are named as nobody else's.
        """
        named = self._named.get(scope)
        if named is None:
            named = self._named[scope] = {}
        blocks = self._blocks_of(ids, limit)
        num_known = bisect_left(blocks, True, key=lambda block: block not in named)
        hashes = list(map(named.__getitem__, blocks[:num_known]))
        new = blocks[num_known:]
        num_named = len(named) + len(new)
        fresh = self.fresh(len(new))
        named.update(zip(new, fresh, strict=True))
        assert len(named) == num_named, "an id stands for two prefixes"
        hashes += fresh
        del hashes[limit:]
        if len(hashes) < limit:
            hashes += self.fresh(limit - len(hashes))
        return hashes

    def fresh(self, count: int) -> list[BlockHash]:
        """Return hashes that no other block has."""
        return list(itertools.islice(self._fresh, count))

    def _blocks_of(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        """Number the engine blocks of a chain, `limit` of them and the rest of the last id's."""
        units, group = self._units, self._group
        if units == group == 1:
            return ids[:limit]
        wanted = ids[group - 1 : -(-limit // units) * group : group]
        return [one * units + unit for one in wanted for unit in range(units)]
