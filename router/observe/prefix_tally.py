"""Which prefixes this gateway's requests share, hottest first; for people, no policy reads it.

Prefixes are counted at 1, 2, 4, 8, … blocks, so that a request costs a few look-ups whatever its
length. Counts are forgotten exponentially. It holds hashes and names, nothing of a text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_PREFIXES = 2048
MAX_BLOCKS = 256
"""Deeper ones are counted here: what is shared is rarely longer."""
HALF_LIFE_S = 300.0
_MERGED = 0.9
"""A prefix is left out when a longer one has at least this share of its requests."""


@dataclass(slots=True)
class Prefix:
    """A prefix and how hot it is: requests, those of `HALF_LIFE_S` ago counting half."""

    model: str
    tenant: str
    hashes: tuple[bytes, ...]
    num_tokens: int
    heat: float
    at: float


class PrefixTally:
    """The newest prefixes, in the order of their last request. Instants are arguments."""

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()

    def add(
        self, hashes: Sequence[bytes], *, block_size: int, model: str, tenant: str, now: float
    ) -> None:
        """Count a request; O(log of its length)."""
        for depth in _depths(len(hashes)):
            key = hashes[depth - 1]
            known = self._prefixes.get(key)
            if known is None:
                prefix = tuple(hashes[:depth])
                self._prefixes[key] = Prefix(model, tenant, prefix, depth * block_size, 1.0, now)
            else:
                known.heat, known.at = _cooled(known, now) + 1.0, now
                self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._max_prefixes:
            self._prefixes.popitem(last=False)

    def hottest(self, count: int, *, now: float) -> list[Prefix]:
        """Return the prefixes that saved most work if they were cached, each as long as it goes."""
        shared = {key: p for key, p in self._prefixes.items() if _cooled(p, now) > 1.0}
        covered = set()
        for prefix in shared.values():
            for depth in _depths(len(prefix.hashes) - 1):
                shorter = shared.get(prefix.hashes[depth - 1])
                if shorter and _cooled(prefix, now) >= _MERGED * _cooled(shorter, now):
                    covered.add(prefix.hashes[depth - 1])
        found = [prefix for key, prefix in shared.items() if key not in covered]
        found.sort(key=lambda prefix: -_cooled(prefix, now) * prefix.num_tokens)
        return [
            Prefix(p.model, p.tenant, p.hashes, p.num_tokens, _cooled(p, now), p.at)
            for p in found[:count]
        ]


def _cooled(prefix: Prefix, now: float) -> float:
    return float(prefix.heat * 2.0 ** ((prefix.at - now) / HALF_LIFE_S))


def _depths(length: int) -> Iterator[int]:
    depth = 1
    while depth <= min(length, MAX_BLOCKS):
        yield depth
        depth *= 2
