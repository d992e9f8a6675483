"""From a trace's block ids to hashes of engine blocks, once per request.

An id stands for its whole prefix, so any one-to-one naming keeps the prefix structure. Hashes are
8 bytes, the part that an index keeps. It knows neither caches nor time.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import cast

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import BlockHash

_HASH_BYTES = 8


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
        self._named: dict[Hashable, dict[int, tuple[BlockHash, ...]]] = {}
        self._num_named = 0

    def chain(self, scope: Hashable, ids: Sequence[int], *, limit: int) -> list[BlockHash]:
        """Return the hashes of the first `limit` engine blocks of a chain of ids.

        Blocks beyond the last id are named as nobody else's.
        """
        named = self._named.setdefault(scope, {})
        num_ids = min(len(ids), -(-limit // self._units) * self._group)
        wanted = ids[self._group - 1 : num_ids : self._group]
        names = list(map(named.get, wanted))
        unknown = [i for i, known in enumerate(names) if known is None]
        if unknown:
            made = zip(*[iter(self.fresh(len(unknown) * self._units))] * self._units, strict=True)
            for i, name in zip(unknown, made, strict=True):
                names[i] = named[wanted[i]] = name
        hashes = list(itertools.chain.from_iterable(filter(None, names)))
        del hashes[limit:]
        if len(hashes) < limit:
            hashes += self.fresh(limit - len(hashes))
        return hashes

    def fresh(self, count: int) -> list[BlockHash]:
        """Return hashes that no other block has."""
        first = self._num_named
        self._num_named += count
        numbers = range(first, first + count)
        return cast("list[BlockHash]", [n.to_bytes(_HASH_BYTES, "big") for n in numbers])
