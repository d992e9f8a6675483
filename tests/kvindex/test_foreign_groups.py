"""Foreign engines with several cache groups: what their events say is what they would hit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.request import Request
from kvindex.events import EventBatch, decode_batch, encode_batch
from kvindex.foreign_inventory import ForeignInventory
from kvindex.hashing import HashScheme, hash_tokens
from kvindex.hit_rule import CacheLayout, GroupRule
from kvindex.index import IndexOp
from kvindex.memory_index import MemoryIndex
from tests.contracts.index_subject import BOOT_NS, A, removed, stored
from tests.engine.build import BLOCK_SIZE, make_request, run
from tests.engine.hybrid import GROUPS, make_hybrid_core
from tests.kvindex.foreign_engine import ForeignPrompt, tokens_of

SCHEME = HashScheme()
FULL: dict[str, Any] = {"kv_cache_spec_kind": "full_attention"}
WINDOW: dict[str, Any] = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 40,
}
PROMPT = ForeignPrompt(tokens_of(320), block_size=32)
HASHES: list[bytes] = [*hash_tokens(PROMPT.tokens, SCHEME)]
ENDS = HASHES[1::2]
"""The pool's hashes at which the engine's blocks end."""

LAYOUT = CacheLayout(
    groups=(
        GroupRule(kind="full", block_size=32),
        GroupRule(kind="window", block_size=32, span=40),
    ),
    hash_block_size=16,
    granularity=32,
)


def tell(held: ForeignInventory, *events: Any) -> tuple[IndexOp, ...]:
    return held.apply(EventBatch(0.0, list(events), 0))


def in_window(hashes: list[bytes]) -> IndexOp:
    return stored(hashes, group=1)


def test_each_group_is_retold_under_its_own_number() -> None:
    held = ForeignInventory(SCHEME)
    told = tell(held, PROMPT.stored(**WINDOW), PROMPT.stored(**FULL))
    assert [*told] == [stored(HASHES), in_window(ENDS)] == held.snapshot()
    assert (held.layout, held.limitation) == (LAYOUT, None)
    first, *_ = PROMPT.removed(0, 1, group_idx=1)
    assert tell(held, first) == (IndexOp(kind="removed", hashes=(ENDS[0],), group=1),)
    assert tell(held, *PROMPT.removed(9)) == (removed(HASHES[18:]),)


def test_masked_blocks_are_known_by_those_of_another_group() -> None:
    """vLLM leaves out the names of blocks that a window has passed, but not their tokens."""
    held = ForeignInventory(SCHEME)
    tell(held, PROMPT.stored(**FULL))
    masked = PROMPT.stored(8, token_ids=PROMPT.tokens, parent_block_hash=None, **WINDOW)
    tell(held, masked)
    assert held.snapshot() == [stored(HASHES), in_window(ENDS[8:])]
    assert held.counters.num_masked == 0
    tell(held, PROMPT.stored(4, 4, token_ids=PROMPT.tokens, **WINDOW))
    assert held.counters.num_masked == 0


def test_masked_blocks_that_nobody_told_of_are_counted() -> None:
    held = ForeignInventory(SCHEME)
    tell(held, PROMPT.stored(0, 4, **FULL))
    tell(held, PROMPT.stored(2, token_ids=PROMPT.tokens, **WINDOW))
    assert held.snapshot() == [stored(HASHES[:8]), in_window(ENDS[2:4])]
    assert held.counters.num_masked == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_cache_spec_kind": "ring"}, "group 1 is of the unknown kind 'ring'"),
        ({"kv_cache_spec_kind": None}, "group 1 does not say what its layers read"),
        (
            {"kv_cache_spec_sliding_window": None},
            "group 1 does not say how much of the past its window covers",
        ),
        (
            {"kv_cache_spec_kind": "chunked_local_attention"},
            "group 1 does not say how much of the past its chunk covers",
        ),
    ],
)
def test_groups_that_cannot_be_foreseen_are_not_followed_and_it_says_why(
    fields: dict[str, Any], reason: str
) -> None:
    held = ForeignInventory(SCHEME)
    tell(held, PROMPT.stored(**FULL), PROMPT.stored(**(WINDOW | fields)))
    assert held.limitation == f"only its first cache group is followed: {reason}"
    assert (held.layout, held.snapshot()) == (None, [stored(HASHES)])
    assert held.counters.num_other_groups == 1


def test_blocks_that_do_not_fit_the_pools_are_not_followed() -> None:
    held, odd = ForeignInventory(SCHEME), ForeignPrompt(tokens_of(240), block_size=24)
    tell(held, odd.stored(**FULL), odd.stored(**WINDOW))
    assert held.limitation == (
        "only its first cache group is followed: "
        "group 0 has blocks of 24 tokens, no multiple of the pool's 16"
    )
    assert held.layout is None


def test_an_engine_that_keeps_no_whole_past_is_credited_from_the_start_only() -> None:
    held = ForeignInventory(SCHEME)
    tell(held, PROMPT.stored(0, 3, **(WINDOW | {"group_idx": 0})))
    tell(held, *PROMPT.removed(1, 2))
    assert held.limitation == (
        "no cache group keeps the whole past: only what is held from the start is credited"
    )
    assert (held.layout, held.snapshot()) == (None, [stored(HASHES[:2])])


def decoded(told: list[Any]) -> EventBatch:
    return decode_batch(encode_batch(EventBatch(0.0, told, 0))).batch


FORESEEN = [
    name for name in GROUPS if "full" in name and "chunk" not in name and "drafter" not in name
]
"""vLLM's events say neither how long a chunk is nor which group drafts."""


@pytest.mark.parametrize("name", FORESEEN)
def test_what_events_alone_tell_foresees_the_hit_that_the_engine_gives(name: str) -> None:
    core = make_hybrid_core(GROUPS[name], num_blocks=90)
    contents = core.kv_cache.keep_contents()
    scheme = core.config.hash_scheme
    held, rng = ForeignInventory(scheme), random.Random(5)
    stem = [rng.randrange(200) for _ in range(60)]
    prompts = [
        stem[: rng.randrange(61)] + [rng.randrange(200) for _ in range(rng.randrange(1, 30))]
        for _ in range(24)
    ]
    for i, prompt in enumerate(prompts[:12]):
        run(core, make_request(f"r{i}", prompt, max_tokens=3))
        held.apply(decoded(contents.told(core.take_events())))
    index = MemoryIndex()
    epoch = index.register(A, boot_ns=BOOT_NS, lease_s=60, layout=held.layout)
    assert index.load_snapshot(A, epoch, seq=0, ops=held.snapshot())
    foreseen, given = [], []
    for i, prompt in enumerate(prompts):
        request = Request.admit(make_request(f"q{i}", prompt), scheme, arrival=i)
        given.append(core.kv_cache.find_hit(request).num_tokens)
        (match,) = index.match(request.chain.hashes[: (len(prompt) - 1) // BLOCK_SIZE])
        foreseen.append(match.matched_blocks * BLOCK_SIZE)
    assert held.limitation is None
    assert max(given) > 0
    granularity = 1 if held.layout is None else held.layout.granularity or 1
    assert foreseen == [tokens // granularity * granularity for tokens in given]
