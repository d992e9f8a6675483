"""Hash chains of prompts met lately, so that what conversations repeat is not hashed again.

A stretch of blocks is known by its tokens and by what stands before it: the hash of the stretch
before, which stands for all that, or what a chain begins with. So what two tenants send alike are
two stretches. It computes no hash.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvindex.hashing import Adapter, BlockHash, HashChain, HashScheme

STRETCH_BLOCKS = 8
MAX_STRETCHES = 8192
"""About 1.3 kB each."""

_Before = BlockHash | tuple[HashScheme, str, Adapter | None]


class KnownChains:
    """The newest stretches, at most `max_stretches`. Thread-safe."""

    def __init__(self, *, max_stretches: int = MAX_STRETCHES) -> None:
        self._max_stretches = max_stretches
        self._lock = threading.Lock()
        self._hashes: OrderedDict[tuple[_Before, bytes], list[BlockHash]] = OrderedDict()

    def hash_tokens(
        self,
        tokens: Sequence[int],
        scheme: HashScheme,
        *,
        cache_salt: str,
        adapter: Adapter | None = None,
    ) -> list[BlockHash]:
        """Return what `kvindex.hashing.hash_tokens` does; tokens are below 2^32."""
        chain = HashChain(scheme, cache_salt=cache_salt, adapter=adapter)
        stretches = _stretches(tokens, STRETCH_BLOCKS * scheme.block_size)
        before: _Before = (scheme, cache_salt, adapter)
        with self._lock:
            for stretch in stretches:
                known = self._hashes.get((before, stretch))
                if known is None:
                    break
                self._hashes.move_to_end((before, stretch))
                chain.hashes += known
                before = known[-1]
        num_known = len(chain.hashes)
        chain.extend(tokens)
        self._keep(stretches[num_known // STRETCH_BLOCKS :], before, chain.hashes[num_known:])
        return chain.hashes

    def _keep(
        self, stretches: Sequence[bytes], before: _Before, hashes: Sequence[BlockHash]
    ) -> None:
        with self._lock:
            for i, stretch in enumerate(stretches):
                known = list(hashes[i * STRETCH_BLOCKS : (i + 1) * STRETCH_BLOCKS])
                self._hashes[before, stretch] = known
                before = known[-1]
            while len(self._hashes) > self._max_stretches:
                self._hashes.popitem(last=False)


def _stretches(tokens: Sequence[int], length: int) -> list[bytes]:
    """Return the full stretches of so many tokens each."""
    packed = array("I", tokens)
    size, data = length * packed.itemsize, packed.tobytes()
    return [data[at : at + size] for at in range(0, len(data) - size + 1, size)]
