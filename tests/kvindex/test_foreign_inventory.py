"""What a foreign engine's events say, retold in the hashes of the pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.events import AllBlocksCleared, EventBatch, WireHash
from kvindex.foreign_inventory import ForeignInventory
from kvindex.hashing import Adapter, HashScheme, hash_tokens
from kvindex.index import IndexOp
from tests.contracts.index_subject import CLEARED, removed, stored
from tests.kvindex.foreign_engine import ForeignPrompt, tokens_of

SCHEME = HashScheme()
ADAPTERS = {"x": Adapter("x", "/adapters/x")}


def inventory(scheme: HashScheme = SCHEME) -> ForeignInventory:
    return ForeignInventory(scheme, adapters=ADAPTERS)


def tell(held: ForeignInventory, *events: Any) -> tuple[IndexOp, ...]:
    return held.apply(EventBatch(0.0, list(events), 0))


def ours(tokens: list[int], scheme: HashScheme = SCHEME, **extra: Any) -> list[bytes]:
    return [*hash_tokens(tokens, scheme, **extra)]


@pytest.mark.fault("router-15")
@pytest.mark.parametrize("size", [8, 16, 24, 32, 48, 128])
@pytest.mark.parametrize("as_bytes", [False, True], ids=["int", "bytes"])
def test_blocks_of_any_size_become_those_of_the_pool(size: int, as_bytes: bool) -> None:
    tokens, held = tokens_of(size * 6), inventory()
    prompt = ForeignPrompt(tokens, block_size=size, as_bytes=as_bytes)
    ops = [*tell(held, prompt.stored(0, 2)), *tell(held, prompt.stored(2))]
    hashes = [block_hash for op in ops for block_hash in op.hashes]
    assert hashes == ours(tokens)
    assert held.block_size == size


def test_what_is_removed_is_removed_under_the_pools_hash() -> None:
    prompt, held = ForeignPrompt(tokens_of(96)), inventory()
    tell(held, prompt.stored())
    assert tell(held, *prompt.removed(2)) == (removed(ours(tokens_of(96))[4:]),)
    assert held.snapshot() == [stored(ours(tokens_of(96))[:4])]
    assert tell(held, *prompt.removed(0, 2)) == (
        removed([*ours(tokens_of(96))[2:4], *ours(tokens_of(96))[:2]]),
    )
    assert (held.num_blocks, held.snapshot()) == (0, [])


def test_the_last_copy_counts() -> None:
    """vLLM announces every copy of a block, and the end of each."""
    prompt, held = ForeignPrompt(tokens_of(32)), inventory()
    assert tell(held, prompt.stored(), prompt.stored()) == (stored(ours(tokens_of(32))),)
    assert tell(held, *prompt.removed()) == ()
    assert tell(held, *prompt.removed()) == (removed(ours(tokens_of(32))),)
    assert tell(held, *prompt.removed()) == ()


def test_two_blocks_that_begin_alike_share_the_pools_block_of_their_beginning() -> None:
    tokens = tokens_of(32)
    other = [*tokens[:16], *tokens_of(16, first=500)]
    left, right = ForeignPrompt(tokens), ForeignPrompt(other)
    held = inventory()
    assert tell(held, left.stored()) == (stored(ours(tokens)),)
    assert tell(held, right.stored()) == (stored(ours(other)[1:]),)
    assert tell(held, *left.removed()) == (removed(ours(tokens)[1:]),)
    assert tell(held, *right.removed()) == (removed(ours(other)),)


def test_a_block_is_credited_only_while_all_before_it_are_held() -> None:
    prompt, held = ForeignPrompt(tokens_of(96)), inventory()
    hashes = ours(tokens_of(96))
    tell(held, prompt.stored())
    assert tell(held, *prompt.removed(0, 1)) == (removed([*hashes[:2], *hashes[2:6]]),)
    assert held.snapshot() == []
    assert tell(held, prompt.stored(0, 1)) == (stored(hashes),)


def test_what_was_removed_behind_a_hole_does_not_come_back_with_it() -> None:
    prompt, held = ForeignPrompt(tokens_of(96)), inventory()
    tell(held, prompt.stored())
    tell(held, *prompt.removed(0, 1), *prompt.removed(2, 3))
    assert tell(held, prompt.stored(0, 1)) == (stored(ours(tokens_of(96))[:4]),)


@pytest.mark.fault("router-2")
def test_a_block_behind_an_unknown_parent_is_never_taken_for_a_root() -> None:
    prompt, held = ForeignPrompt(tokens_of(96)), inventory()
    assert tell(held, prompt.stored(1)) == ()
    assert held.counters.num_orphans == 2
    assert tell(held, prompt.stored()) == (stored(ours(tokens_of(96))),)


@pytest.mark.fault("router-17")
def test_a_salt_is_part_of_the_pools_hash() -> None:
    tokens = tokens_of(64)
    salted, plain = ForeignPrompt(tokens, salt="tenant-a"), ForeignPrompt(tokens)
    held = inventory()
    assert tell(held, salted.stored()) == (stored(ours(tokens, cache_salt="tenant-a")),)
    assert tell(held, plain.stored()) == (stored(ours(tokens)),)


@pytest.mark.parametrize("size", [8, 24])
def test_a_salt_counts_where_the_first_block_of_the_pool_ends_in_a_later_one(size: int) -> None:
    tokens = tokens_of(size * 4)
    held = inventory()
    prompt = ForeignPrompt(tokens, block_size=size, salt="s")
    ops = tell(held, prompt.stored())
    assert ops == (stored(ours(tokens, cache_salt="s")),)


@pytest.mark.fault("router-16")
def test_the_name_of_an_adapter_is_no_salt_and_no_image() -> None:
    tokens = tokens_of(64)
    prompt, held = ForeignPrompt(tokens, lora="x", salt="s"), inventory()
    hashes = ours(tokens, cache_salt="s", adapter=ADAPTERS["x"])
    assert tell(held, prompt.stored()) == (stored(hashes),)
    assert not set(hashes) & set(ours(tokens))


@pytest.mark.parametrize(
    ("fields", "counter"),
    [
        ({"lora_name": "unheard"}, "num_unreadable"),
        ({"extra_keys": [[["image", 3]], None]}, "num_unreadable"),
        ({"extra_keys": [[b"embeds"], None]}, "num_unreadable"),
        ({"token_ids": [1, 2, 3]}, "num_masked"),
        ({"group_idx": 1}, "num_other_groups"),
    ],
)
def test_what_cannot_be_retold_is_counted_and_not_credited(
    fields: dict[str, Any], counter: str
) -> None:
    held = inventory()
    assert tell(held, ForeignPrompt(tokens_of(64)).stored(**fields)) == ()
    assert getattr(held.counters, counter) == 1


def test_tagged_extra_keys_are_read_as_well() -> None:
    tokens, held = tokens_of(32), inventory()
    event = ForeignPrompt(tokens, salt="s").stored(extra_keys=[[["cache_salt", "s"]]])
    assert tell(held, event) == (stored(ours(tokens, cache_salt="s")),)


def test_an_engine_that_hides_salts_is_not_trusted() -> None:
    held = inventory()
    tell(held, ForeignPrompt(tokens_of(32)).stored(extra_keys=None))
    assert held.limitation == "its events carry no extra keys: cache salts cannot be told apart"


@pytest.mark.fault("router-7")
def test_a_block_that_moves_to_the_host_stays_credited() -> None:
    prompt, held = ForeignPrompt(tokens_of(64)), inventory()
    hashes = ours(tokens_of(64))
    tell(held, prompt.stored())
    assert tell(held, prompt.stored(1, medium="CPU")) == (stored(hashes[2:], tier="host"),)
    assert tell(held, *prompt.removed(1)) == (removed(hashes[2:]),)
    assert tell(held, prompt.stored(medium="STORAGE")) == ()
    assert held.snapshot() == [stored(hashes[:2]), stored(hashes[2:], tier="host")]


def test_clearing_forgets_everything_before_it() -> None:
    prompt, held = ForeignPrompt(tokens_of(32)), inventory()
    ops = tell(held, prompt.stored(), AllBlocksCleared(), prompt.stored())
    assert ops == (CLEARED, stored(ours(tokens_of(32))))


# Whatever the engine stores and evicts, in whatever order, what is credited is what it would hit.

STEM = tokens_of(160)
FAMILY = [
    ForeignPrompt(tokens, block_size=24)
    for tokens in (STEM, [*STEM[:56], *tokens_of(88, 300)], [*STEM[:40], *tokens_of(56, 400)])
]
actions = st.lists(
    st.tuples(st.sampled_from(range(3)), st.integers(0, 6), st.booleans()), max_size=60
)


@given(actions)
@settings(max_examples=150, deadline=None)
def test_what_is_credited_is_what_is_held_with_everything_before_it(
    steps: list[tuple[int, int, bool]],
) -> None:
    held = inventory()
    known: set[WireHash] = set()
    copies: Counter[WireHash] = Counter()
    index: set[bytes] = set()
    for which, place, is_stored in steps:
        prompt = FAMILY[which]
        place = min(place, len(prompt.names) - 1)
        name = prompt.names[place]
        if is_stored:
            ops = tell(held, prompt.stored(place, place + 1))
            # Behind a block that is unknown nothing can be placed, and no copy is counted.
            if place == 0 or prompt.names[place - 1] in known:
                copies[name] += 1
        else:
            ops = tell(held, *prompt.removed(place, place + 1))
            copies[name] -= copies[name] > 0
        known = _known_blocks(copies)
        for op in ops:
            index = index | {*op.hashes} if op.kind == "stored" else index - {*op.hashes}
        assert index == _credited(copies)
        assert {h for op in held.snapshot() for h in op.hashes} == index
    assert held.num_blocks == len(known)


def _known_blocks(copies: Counter[WireHash]) -> set[WireHash]:
    """Return the blocks that are held, and those before them."""
    return {
        name
        for prompt in FAMILY
        for i, last in enumerate(prompt.names)
        if copies[last]
        for name in prompt.names[: i + 1]
    }


def _credited(copies: Counter[WireHash]) -> set[bytes]:
    """Return the pool's blocks that end inside the longest held beginning of some prompt."""
    credited: set[bytes] = set()
    for prompt in FAMILY:
        num = next((i for i, n in enumerate(prompt.names) if not copies[n]), len(prompt.names))
        credited.update(ours(prompt.tokens[: num * prompt.block_size]))
    return credited
