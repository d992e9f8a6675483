"""How long a prefix an engine can take from its cache, given what each cache group holds.

A model's layers fall into cache groups that read different parts of the past; a hit must serve
every group. The engine asks before it admits a request, the index before it predicts: both call
this. It knows neither blocks nor tokens, only positions in a hash chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

GroupKind = Literal["full", "window", "chunk", "state"]


class GroupRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of the past the layers of one cache group read; sizes in tokens.

    `full` reads everything, `window` the last `span` tokens (its own included), `chunk` the tokens
    since the last multiple of `span`, `state` only the state after the last token. `drafter`: the
    entries of a position also depend on the next token (EAGLE, MTP), so a hit of L tokens needs
    the block after it to be known too. Raises ValueError for sizes that make no sense.
    """

    kind: GroupKind
    block_size: int
    span: int | None = None
    drafter: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}: expected at least 1 token")
        if self.kind in ("window", "chunk"):
            if self.span is None or self.span < 1:
                raise ValueError(f"span {self.span} of a {self.kind} group: expected >= 1 token")
        elif self.span is not None:
            raise ValueError(f"span {self.span}: a {self.kind} group has none")
        if self.drafter and self.kind == "state":
            raise ValueError("drafter: a state group cannot be one")

    def num_skipped_tokens(self, num_tokens: int) -> int:
        """Return how many leading tokens nobody reads any more once `num_tokens` are computed."""
        if self.kind == "full":
            return 0
        if self.kind == "state":
            return max(0, num_tokens - 1)
        assert self.span is not None
        if self.kind == "window":
            return max(0, num_tokens - self.span + 1)
        return num_tokens // self.span * self.span


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache groups of an engine by their index; what a `HitRule` is made of.

    A group that is never cached is None. `granularity` None is the rule's own choice.
    """

    groups: tuple[GroupRule | None, ...]
    hash_block_size: int
    granularity: int | None = None

    @property
    def cached_groups(self) -> dict[int, GroupRule]:
        """The groups that take part in hits, by index."""
        return {i: group for i, group in enumerate(self.groups) if group is not None}

    def rule(self) -> HitRule:
        """Return the rule of an engine with these groups; it is asked about the cached ones."""
        return HitRule(
            list(self.cached_groups.values()),
            hash_block_size=self.hash_block_size,
            granularity=self.granularity,
        )


class GroupPresence(Protocol):
    """What one group holds of one hash chain."""

    def num_leading(self, limit: int) -> int:
        """Return how many of the group's first `limit` blocks are held without a gap."""
        ...

    def has(self, position: int) -> bool:
        """Tell whether a block is held that ends with the hash at this position of the chain."""
        ...


class HitRule:
    """The hit that an engine with these groups gives; stateless, safe to share.

    Every hit is a multiple of `granularity` tokens. Left out, that is the hash block size, or the
    least common multiple of the state groups' blocks: attention blocks may be hit in part (the
    engine copies the tail), a state exists only at the end of its block. An engine that cannot
    copy has the least common multiple of all block sizes.
    """

    def __init__(
        self,
        groups: Sequence[GroupRule],
        *,
        hash_block_size: int,
        granularity: int | None = None,
    ) -> None:
        for group in groups:
            if group.block_size % hash_block_size:
                raise ValueError(
                    f"a group's block of {group.block_size} tokens is no multiple of the hash "
                    f"block of {hash_block_size}"
                )
        states = [group.block_size for group in groups if group.kind == "state"]
        self.groups = tuple(groups)
        self.hash_block_size = hash_block_size
        self.granularity = granularity or math.lcm(hash_block_size, *states)

    def longest(self, held: Sequence[GroupPresence], *, max_tokens: int) -> int:
        """Return the tokens of the longest hit of at most `max_tokens`; `held` is per group.

        Each group can only shorten the candidate, so this ends at the longest prefix that all of
        them serve. O(blocks) look-ups; groups that read everything are asked first, because they
        stop at the first gap.
        """
        if not self.groups:
            return 0
        end = max_tokens // self.hash_block_size * self.hash_block_size
        limit = self._align(max_tokens)
        for group, presence in zip(self.groups, held, strict=True):
            if group.kind == "full":
                limit = self._leading(group, presence, limit)
        while limit:
            candidate = limit
            for group, presence in zip(self.groups, held, strict=True):
                candidate = self._served(group, presence, candidate, end)
            if candidate == limit:
                break
            limit = candidate
        return limit

    def _align(self, num_tokens: int) -> int:
        return num_tokens // self.granularity * self.granularity

    def _leading(self, group: GroupRule, presence: GroupPresence, limit: int) -> int:
        """Shorten a candidate to where a gap in a full group may let it end at most."""
        num_blocks = limit // group.block_size
        num_held = presence.num_leading(num_blocks)
        if num_held == num_blocks:
            return limit
        return self._align((num_held + 1) * group.block_size - 1)

    def _served(self, group: GroupRule, presence: GroupPresence, limit: int, end: int) -> int:
        """Return the longest prefix of at most `limit` tokens that this group serves."""
        while limit:
            shorter = self._shorten(group, presence, limit, end)
            if shorter is None:
                return limit
            limit = shorter
        return 0

    def _shorten(
        self, group: GroupRule, presence: GroupPresence, limit: int, end: int
    ) -> int | None:
        """Return the next candidate when a block that a hit of `limit` needs is missing.

        A missing block rules out every candidate that covers it whole: what a shorter hit may
        leave out, a longer one may too.
        """
        size, unit = group.block_size, self.hash_block_size
        if group.drafter:
            beyond = limit + min(size, self.granularity)
            if beyond > end or not presence.has(beyond // unit - 1):
                return limit - self.granularity
        skipped = group.num_skipped_tokens(limit)
        if limit % size and skipped < limit and not presence.has(limit // unit - 1):
            return limit - self.granularity
        if group.kind == "full":
            return None
        for block in range(limit // size - 1, skipped // size - 1, -1):
            if not presence.has((block + 1) * size // unit - 1):
                return self._align((block + 1) * size - 1)
        return None
