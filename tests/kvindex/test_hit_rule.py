"""The hit rule: the longest prefix that every cache group can serve, for every kind of group."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.hit_rule import GroupRule, HitRule

UNIT = 4


class Held:
    """Which positions of a chain one group holds."""

    def __init__(self, positions: Collection[int], *, block_size: int = UNIT) -> None:
        self._positions = positions
        self._stride = block_size // UNIT
        self.num_asked = 0

    def num_leading(self, limit: int) -> int:
        for block in range(limit):
            if not self.has((block + 1) * self._stride - 1):
                return block
        return limit

    def has(self, position: int) -> bool:
        self.num_asked += 1
        return position in self._positions


FULL = GroupRule(kind="full", block_size=UNIT)


def longest(rules: list[GroupRule], held: list[Collection[int]], *, max_tokens: int) -> int:
    """Ask the rule about chains held as given."""
    presence = [Held(h, block_size=r.block_size) for h, r in zip(held, rules, strict=True)]
    return HitRule(rules, hash_block_size=UNIT).longest(presence, max_tokens=max_tokens)


def test_full_attention_ends_at_its_first_gap() -> None:
    assert longest([FULL], [{0, 1, 2, 4, 5}], max_tokens=99) == 12


def test_a_hit_is_never_longer_than_asked_for() -> None:
    assert longest([FULL], [range(10)], max_tokens=19) == 16


def test_a_cold_chain_costs_one_look_up() -> None:
    held = Held(())
    assert HitRule([FULL], hash_block_size=UNIT).longest([held], max_tokens=4000) == 0
    assert held.num_asked == 1


def test_a_window_needs_only_its_last_blocks() -> None:
    window = GroupRule(kind="window", block_size=UNIT, span=6)
    assert longest([window], [{6, 7}], max_tokens=32) == 32
    assert longest([window], [{5, 7}], max_tokens=32) == 0


def test_a_window_that_reaches_the_start_needs_no_more_than_there_is() -> None:
    window = GroupRule(kind="window", block_size=UNIT, span=100)
    assert longest([window], [{0, 1, 3}], max_tokens=32) == 8


def test_a_chunk_begins_anew_at_its_border() -> None:
    chunk = GroupRule(kind="chunk", block_size=UNIT, span=16)
    assert longest([chunk], [()], max_tokens=32) == 32
    assert longest([chunk], [{4}], max_tokens=24) == 20


def test_a_state_is_one_block_and_exists_only_at_its_end() -> None:
    state = GroupRule(kind="state", block_size=8)
    assert longest([state], [{3, 6}], max_tokens=99) == 16


def test_groups_shorten_each_other_until_none_objects() -> None:
    """The window ends the candidate at 24, there the state is missing, at 16 the window again."""
    window = GroupRule(kind="window", block_size=UNIT, span=5)
    state = GroupRule(kind="state", block_size=8)
    held: list[Collection[int]] = [range(8), {0, 1, 2, 4, 5}, {1, 3, 7}]
    assert longest([FULL, window, state], held, max_tokens=32) == 8


@pytest.mark.fault("engine-38")
def test_a_coarse_group_is_hit_in_part_so_that_short_prompts_hit_at_all() -> None:
    coarse = GroupRule(kind="full", block_size=4 * UNIT)
    assert longest([FULL, coarse], [range(3), range(3)], max_tokens=12) == 12
    lcm_only = HitRule([FULL, coarse], hash_block_size=UNIT, granularity=16)
    held = [Held(range(3)), Held(range(3), block_size=16)]
    assert lcm_only.longest(held, max_tokens=12) == 0


@pytest.mark.fault("engine-38")
def test_a_drafter_drops_one_block_and_never_two() -> None:
    """When another group shortens the hit anyway, the block after it is known: nothing to drop."""
    drafter = GroupRule(kind="full", block_size=UNIT, drafter=True)
    assert longest([drafter], [range(6)], max_tokens=99) == 20
    assert longest([FULL, drafter], [range(6), range(6)], max_tokens=24) == 20
    assert longest([FULL, drafter], [range(4), range(6)], max_tokens=99) == 16


def test_no_group_means_no_hit() -> None:
    assert HitRule([], hash_block_size=UNIT).longest([], max_tokens=99) == 0


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "full", "block_size": 0}, "at least 1 token"),
        ({"kind": "window", "block_size": 4}, "span None of a window group"),
        ({"kind": "chunk", "block_size": 4, "span": 0}, "span 0 of a chunk group"),
        ({"kind": "state", "block_size": 4, "span": 2}, "a state group has none"),
        ({"kind": "state", "block_size": 4, "drafter": True}, "a state group cannot be one"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(rule: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupRule(**rule)  # type: ignore[arg-type]


def test_a_block_that_is_no_multiple_of_the_hash_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of the hash block of 4"):
        HitRule([GroupRule(kind="full", block_size=6)], hash_block_size=UNIT)


group_rules = st.builds(
    lambda kind, blocks, span, drafter: GroupRule(
        kind=kind,
        block_size=blocks * UNIT,
        span=span if kind in ("window", "chunk") else None,
        drafter=drafter and kind != "state",
    ),
    st.sampled_from(["full", "window", "chunk", "state"]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
)


def serves(rule: GroupRule, held: Collection[int], num_tokens: int, end: int, step: int) -> bool:
    """Say, word for word, what a hit needs of a group."""
    first_read = rule.num_skipped_tokens(num_tokens)
    whole = range(first_read // rule.block_size, num_tokens // rule.block_size)
    needed = {(block + 1) * rule.block_size // UNIT - 1 for block in whole}
    if num_tokens % rule.block_size and first_read < num_tokens:
        needed.add(num_tokens // UNIT - 1)
    if rule.drafter:
        beyond = num_tokens + min(rule.block_size, step)
        if beyond > end:
            return False
        needed.add(beyond // UNIT - 1)
    return needed <= set(held)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    rules=st.lists(group_rules, min_size=1, max_size=3),
    missing=st.lists(st.sets(st.integers(0, 24), max_size=8), min_size=3, max_size=3),
    max_tokens=st.integers(0, 100),
)
def test_the_hit_is_the_longest_that_all_groups_serve(
    rules: list[GroupRule], missing: list[set[int]], max_tokens: int
) -> None:
    held = [set(range(25)) - gaps for gaps in missing[: len(rules)]]
    rule = HitRule(rules, hash_block_size=UNIT)
    end = max_tokens // UNIT * UNIT
    expected = max(
        length
        for length in range(0, max_tokens + 1, rule.granularity)
        if length == 0
        or all(
            serves(r, h, length, end, rule.granularity) for r, h in zip(rules, held, strict=True)
        )
    )
    presence = [Held(h, block_size=r.block_size) for h, r in zip(held, rules, strict=True)]
    assert rule.longest(presence, max_tokens=max_tokens) == expected
