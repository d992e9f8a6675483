"""Cache layouts as Redis keeps them, and hits from what a match tells of each group.

The server only reads presence; the hit is the engine's own rule's, here as in the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvindex.hit_rule import CacheLayout, GroupRule, HitRule

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CacheLayout)
_HELD = ord("1")


def pack_layout(layout: CacheLayout) -> bytes:
    """Serialise a layout behind what lua/match.lua reads of it.

    Kind "f" is a group that holds whole chains, unit by unit, so that its presence is one number,
    "n" one that is never cached; the margin is how many positions beyond those numbers the rule
    may still ask about.
    """
    unit = layout.hash_block_size
    kinds = "".join(_kind(group, unit) for group in layout.groups)
    margin = max((g.block_size // unit for g in layout.cached_groups.values()), default=0)
    return f"{kinds}:{margin}|".encode() + _encoder.encode(layout)


def hit_blocks(packed: bytes, presence: Sequence[int | bytes], num_hashes: int) -> int:
    """Return the hit that an engine of this layout would give of a chain, in hashes."""
    layout, rule = _unpack(packed)
    unit = layout.hash_block_size
    held = [
        _Leading(answer) if isinstance(answer, int) else _Bits(answer, group.block_size // unit)
        for group, answer in zip(layout.groups, presence, strict=True)
        if group is not None
    ]
    return rule.longest(held, max_tokens=num_hashes * unit) // unit


def _kind(group: GroupRule | None, unit: int) -> str:
    if group is None:
        return "n"
    return "f" if group.kind == "full" and group.block_size == unit else "b"


@functools.lru_cache(maxsize=256)
def _unpack(packed: bytes) -> tuple[CacheLayout, HitRule]:
    layout = _decoder.decode(packed.partition(b"|")[2])
    return layout, layout.rule()


@dataclass(slots=True)
class _Leading:
    """`GroupPresence` of a group that holds the first `num_blocks` positions."""

    num_blocks: int

    def num_leading(self, limit: int) -> int:
        return min(limit, self.num_blocks)

    def has(self, position: int) -> bool:
        return position < self.num_blocks


@dataclass(slots=True)
class _Bits:
    """`GroupPresence` of a group by a digit for each position; what lies beyond is not held."""

    bits: bytes
    stride: int

    def num_leading(self, limit: int) -> int:
        ends = range(self.stride - 1, limit * self.stride, self.stride)
        return next((i for i, end in enumerate(ends) if not self.has(end)), limit)

    def has(self, position: int) -> bool:
        return position < len(self.bits) and self.bits[position] == _HELD
