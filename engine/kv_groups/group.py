"""One cache group of an engine: how many blocks it takes, and which it may give back.

Arithmetic only: it holds no blocks (block_table.py) and searches no cache (coordinator.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.kv_groups.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVGroupSpec,
    LinearState,
    SlidingWindow,
)
from kvindex.foundation.errors import ConfigError
from kvindex.hit_rule import GroupRule

_STATES_PER_PLAN = 3
_PLANS_PER_STEP = 2


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """How far scheduling runs ahead of what has been computed.

    `max_step_tokens`: tokens of one request in one step, None when nobody knows a bound.
    `num_steps`: steps that may be scheduled but not returned, the one being planned included.
    """

    max_step_tokens: int | None = None
    num_steps: int = 1


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the engine runs it; `rule` is None for a group that is never cached."""

    index: int
    spec: KVGroupSpec
    block_size: int
    rule: GroupRule | None

    @property
    def grows(self) -> bool:
        """Whether longer sequences need more blocks."""
        return not isinstance(self.spec, CrossAttention)

    @property
    def is_state(self) -> bool:
        """Whether its blocks hold states instead of entries per token."""
        return isinstance(self.spec, LinearState)

    @property
    def recycles(self) -> bool:
        """Whether blocks fall out of use while a request runs."""
        return self.rule is not None and self.rule.kind != "full"

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of a block table that covers so many tokens."""
        covered = self.spec.num_tokens if isinstance(self.spec, CrossAttention) else num_tokens
        return -(-covered // self.block_size)

    def new_indices(
        self, num_held: int, num_tokens: int, *, partings: Iterable[int]
    ) -> Sequence[int]:
        """Return which blocks a table of `num_held` needs to cover `num_tokens`, ascending.

        A state group takes the last block, the last full one and the last one where other requests
        may leave the chain (after so many tokens): which of those states stay, states.py decides.
        """
        end = self.num_blocks(num_tokens)
        if not self.is_state or end <= num_held:
            return range(num_held, end)
        num_full = num_tokens // self.block_size
        parting = max((p // self.block_size for p in partings if p <= num_tokens), default=0)
        return sorted(i - 1 for i in {parting, num_full, end} if num_held < i <= end)

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Return how many leading blocks nobody reads once `num_tokens` are computed."""
        if self.rule is None:
            return 0
        return self.rule.num_skipped_tokens(num_tokens) // self.block_size

    def max_held_blocks(self, num_tokens: int, ahead: InFlight) -> int:
        """Return the most blocks held at once while a sequence grows to `num_tokens`."""
        all_blocks = self.num_blocks(num_tokens)
        if not self.recycles:
            return all_blocks
        if self.is_state:
            return min(all_blocks, 1 + ahead.num_steps * _PLANS_PER_STEP * _STATES_PER_PLAN)
        if ahead.max_step_tokens is None:
            return all_blocks
        assert self.rule is not None
        assert self.rule.span is not None
        reach = self.rule.span - 1 + ahead.num_steps * ahead.max_step_tokens
        return min(all_blocks, self.num_blocks(reach) + 1)


def resolve_groups(specs: Sequence[KVGroupSpec], *, hash_block_size: int) -> tuple[KVGroup, ...]:
    """Number the groups and fill in block sizes; raise ConfigError when they cannot work."""
    groups = tuple(_resolve(i, spec, hash_block_size) for i, spec in enumerate(specs))
    if not any(group.grows for group in groups):
        raise ConfigError("kv_groups: expected at least one group that grows with the sequence")
    return groups


def _resolve(index: int, spec: KVGroupSpec, hash_block_size: int) -> KVGroup:
    block_size = hash_block_size if spec.block_size is None else spec.block_size
    try:
        rule = _rule(spec, block_size)
    except ValueError as error:
        raise ConfigError(f"kv_groups[{index}]: {error}") from None
    if rule is not None and block_size % hash_block_size:
        raise ConfigError(
            f"kv_groups[{index}].block_size {block_size}: expected a multiple of "
            f"engine.block_size, which is {hash_block_size}; set that to a common divisor of all "
            "groups"
        )
    return KVGroup(index=index, spec=spec, block_size=block_size, rule=rule)


def _rule(spec: KVGroupSpec, block_size: int) -> GroupRule | None:
    """Return what a hit must serve, None for a group that takes no part in hits.

    A group that is not causal is cut to full attention: nothing of it is given back early.
    """
    match spec:
        case LinearState():
            return GroupRule(kind="state", block_size=block_size)
        case FullAttention(causal=True, drafter=drafter):
            return GroupRule(kind="full", block_size=block_size, drafter=drafter)
        case SlidingWindow(causal=True, window=window, drafter=drafter):
            return GroupRule(kind="window", block_size=block_size, span=window, drafter=drafter)
        case ChunkedLocal(causal=True, chunk=chunk, drafter=drafter):
            return GroupRule(kind="chunk", block_size=block_size, span=chunk, drafter=drafter)
        case _:
            return None
