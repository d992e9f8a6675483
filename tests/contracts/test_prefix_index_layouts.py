"""What engines with several cache groups would hit, foretold by the index with their own rule."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from engine.core import EngineCore
from engine.kv_groups.group import resolve_groups
from engine.kv_groups.spec import KVGroupSpec
from engine.request import Request
from kvindex.hit_rule import CacheLayout, GroupRule
from kvindex.index import IndexOp, SequencedOps
from tests.contracts.index_subject import BOOT_NS, A, B, Subject, chain, removed, stored
from tests.engine.build import BLOCK_SIZE, make_request, run
from tests.engine.hybrid import GROUPS, make_hybrid_core

FULL = GroupRule(kind="full", block_size=16)
WINDOW = GroupRule(kind="window", block_size=16, span=40)


def layout(*groups: GroupRule | None) -> CacheLayout:
    return CacheLayout(groups=groups, hash_block_size=16)


def prompts(rng: random.Random) -> list[list[int]]:
    """Return prompts that share beginnings of every length, small enough to be computed."""
    stem = [rng.randrange(200) for _ in range(60)]
    return [
        stem[: rng.randrange(61)] + [rng.randrange(200) for _ in range(rng.randrange(1, 30))]
        for _ in range(24)
    ]


def layout_of(groups: tuple[KVGroupSpec, ...]) -> CacheLayout:
    resolved = resolve_groups(groups, hash_block_size=BLOCK_SIZE)
    return CacheLayout(groups=tuple(group.rule for group in resolved), hash_block_size=BLOCK_SIZE)


def inventory_of(core: EngineCore) -> list[IndexOp]:
    """Return the pool of a core as an ingester would load it."""
    hashes: dict[int, list[bytes]] = defaultdict(list)
    for entry in core.snapshot_entries():
        hashes[entry.group].append(entry.block_hash)
    return [stored(blocks, group=group) for group, blocks in hashes.items()]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
async def test_the_index_foretells_the_hit_that_the_engine_gives(
    subject: Subject, groups: tuple[KVGroupSpec, ...]
) -> None:
    rng = random.Random(5)
    core = make_hybrid_core(groups, num_blocks=90)
    everything = prompts(rng)
    for i, prompt in enumerate(everything[:12]):
        run(core, make_request(f"r{i}", prompt, max_tokens=3))
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60, layout=layout_of(groups))
    assert await subject.index.load_snapshot(A, epoch, seq=0, ops=inventory_of(core))
    foretold, given = [], []
    for i, prompt in enumerate(everything):
        source = make_request(f"q{i}", prompt)
        request = Request.admit(source, core.config.hash_scheme, arrival=i)
        given.append(core.kv_cache.find_hit(request).num_tokens)
        usable = request.chain.hashes[: (len(prompt) - 1) // BLOCK_SIZE]
        match = await subject.match_one(usable)
        foretold.append(match.matched_blocks * BLOCK_SIZE)
    assert foretold == given
    assert max(given) > 0


async def test_a_windowed_group_needs_only_the_end_of_a_hit(subject: Subject) -> None:
    hashes = chain(10)
    epoch = await subject.index.register(
        A, boot_ns=BOOT_NS, lease_s=60, layout=layout(FULL, WINDOW)
    )
    held = (stored(hashes), stored(hashes[5:8], group=1))
    await subject.index.apply(A, epoch, [SequencedOps(0, held)])
    assert await subject.matched(hashes) == {"a": 8}
    gone = IndexOp(kind="removed", hashes=tuple(hashes[5:6]), group=1)
    await subject.index.apply(A, epoch, [SequencedOps(1, (gone,))])
    assert await subject.matched(hashes) == {"a": 0}
    await subject.index.apply(A, epoch, [SequencedOps(2, (removed(hashes[4:]),))])
    assert await subject.matched(hashes) == {"a": 0}


async def test_targets_with_and_without_a_layout_share_a_pool(subject: Subject) -> None:
    hashes = chain(10)
    epoch = await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60, layout=layout(None, FULL))
    await subject.index.apply(A, epoch, [SequencedOps(0, (stored(hashes[:4], group=1),))])
    await subject.filled(B, hashes[:7])
    assert await subject.matched(hashes) == {"a": 4, "b": 7}
    await subject.index.register(A, boot_ns=BOOT_NS, lease_s=60)
    assert await subject.matched(hashes) == {"a": 0, "b": 7}


@pytest.mark.fault("router-7")
async def test_blocks_that_are_only_on_the_host_are_told_apart(subject: Subject) -> None:
    hashes = chain(10)
    epoch = await subject.filled(A, hashes[:6])
    await subject.filled(B, hashes[:9])
    moved = (stored(hashes[2:10], tier="host"), removed(hashes[4:6]))
    await subject.index.apply(A, epoch, [SequencedOps(1, moved)])
    found = [(m.matched_blocks, m.host_blocks) for m in await subject.index.match(hashes)]
    assert found == [(10, 6), (9, 0)]
