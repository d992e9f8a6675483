"""The cache groups of a foreign engine, as its events tell of them.

vLLM says with every stored block what the layers of its group read. Where that is all known, the
index is told, and foresees hits by the engine's own rule. It knows no blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvindex.events import RULE_OF_SPEC_KIND, BlockStored
from kvindex.hit_rule import CacheLayout, GroupRule


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one group's events say of it; older engines name no kind."""

    kind: str | None
    block_size: int
    window: int | None

    @classmethod
    def of(cls, event: BlockStored) -> GroupFacts:
        """Read them off an event."""
        return cls(
            kind=event.kv_cache_spec_kind,
            block_size=event.block_size,
            window=event.kv_cache_spec_sliding_window,
        )

    @property
    def reads_all(self) -> bool:
        """Whether its layers read the whole past, which is what is assumed of an unknown kind."""
        return self.kind is None or RULE_OF_SPEC_KIND.get(self.kind, "full") == "full"

    def trouble(self, unit: int) -> str | None:
        """Say why its hits cannot be foreseen in blocks of `unit` tokens, None when they can."""
        if self.block_size % unit:
            return f"has blocks of {self.block_size} tokens, no multiple of the pool's {unit}"
        if self.kind is None:
            return "does not say what its layers read"
        kind = RULE_OF_SPEC_KIND.get(self.kind)
        if kind is None:
            return f"is of the unknown kind {self.kind!r}"
        if kind == "chunk" or (kind == "window" and not self.window):
            return f"does not say how much of the past its {kind} covers"
        return None

    def rule(self) -> GroupRule:
        """Return its part of the hit rule; only for a group without trouble."""
        assert self.kind is not None, "a group without trouble says what it reads"
        kind = RULE_OF_SPEC_KIND[self.kind]
        span = self.window if kind == "window" else None
        return GroupRule(kind=kind, block_size=self.block_size, span=span)


def trouble_of(groups: Mapping[int, GroupFacts], unit: int) -> str | None:
    """Say why hits cannot be foreseen in all groups, None when they can.

    Where a block lies in the chain is known by those before it, which only a group that reads the
    whole past is sure to keep.
    """
    if _is_plain(groups):
        return None
    if not any(facts.reads_all for facts in groups.values()):
        return "no cache group keeps the whole past: only what is held from the start is credited"
    for group, facts in sorted(groups.items()):
        if (trouble := facts.trouble(unit)) is not None:
            return f"only its first cache group is followed: group {group} {trouble}"
    return None


def layout_of(groups: Mapping[int, GroupFacts], unit: int) -> CacheLayout | None:
    """Return the layout of an engine with these groups, by index.

    None stands for one group that reads the whole past, and for groups that cannot be followed.
    vLLM hits whole blocks of every group at once, so a hit is a multiple of all their sizes.
    """
    if _is_plain(groups) or trouble_of(groups, unit) is not None:
        return None
    rules = [groups[i].rule() if i in groups else None for i in range(max(groups) + 1)]
    sizes = [facts.block_size for facts in groups.values()]
    return CacheLayout(groups=tuple(rules), hash_block_size=unit, granularity=math.lcm(*sizes))


def _is_plain(groups: Mapping[int, GroupFacts]) -> bool:
    """Whether there is one group, and it reads the whole past."""
    return groups.keys() <= {0} and all(facts.reads_all for facts in groups.values())
