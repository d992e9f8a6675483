"""From a trace's block ids to hashes of engine blocks, once per request.

An id stands for its whole prefix, so any one-to-one naming keeps the prefix structure. Hashes are
8 bytes, the part that an index keeps. It knows neither caches nor time.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Hashable, Iterator, Sequence
from typing import cast

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import BlockHash


class BlockNames:
    """Names engine blocks of `block_size` tokens by trace blocks of `trace_block_size`.

    Equal (scope, id) give equal hashes, other pairs other ones; `fresh` never repeats. Memory
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
        self._fresh_units = zip(*[self._fresh] * self._units, strict=True)
        self._named: dict[Hashable, dict[int, tuple[BlockHash, ...]]] = {}

    def chain(self, scope: Hashable, ids: Sequence[int], *, limit: int) -> list[BlockHash]:
        """Return the hashes of the first `limit` engine blocks of a chain of ids.

        Blocks beyond the last id are named as nobody else's.
        """
        named = self._named.setdefault(scope, {})
        num_ids = min(len(ids), -(-limit // self._units) * self._group)
        wanted = ids[self._group - 1 : num_ids : self._group]
        unknown = list(itertools.filterfalse(named.__contains__, wanted))
        named.update(zip(unknown, self._fresh_units, strict=False))
        hashes = list(itertools.chain.from_iterable(map(named.__getitem__, wanted)))
        del hashes[limit:]
        if len(hashes) < limit:
            hashes += self.fresh(limit - len(hashes))
        return hashes

    def fresh(self, count: int) -> list[BlockHash]:
        """Return hashes that no other block has."""
        return list(itertools.islice(self._fresh, count))
