"""What is committed of a run when some of its blocks were given back meanwhile."""

from __future__ import annotations

import pytest

from engine.block import Block
from engine.pending_run import PendingRun
from kvindex.hashing import BlockHash, HashScheme, hash_tokens

ROOT, *CHAIN = hash_tokens(range(24), HashScheme(block_size=4))


def pending(blocks: list[Block]) -> PendingRun:
    """Return a run of these blocks that continues a chain of one block."""
    hashes = CHAIN[: len(blocks)]
    return PendingRun(blocks, [block.generation for block in blocks], hashes, ROOT, None)


def parts(run: PendingRun) -> list[tuple[list[int], list[BlockHash], BlockHash | None]]:
    return [
        ([block.block_id for block in part.blocks], list(part.hashes), part.parent_hash)
        for part in run.held_parts()
    ]


def test_a_run_that_is_held_is_one_part() -> None:
    assert parts(pending([Block(3), Block(1), Block(2)])) == [([3, 1, 2], CHAIN[:3], ROOT)]


@pytest.mark.parametrize(
    ("given_back", "left"),
    [
        ([0], [([2, 3, 4, 5], CHAIN[1:5], CHAIN[0])]),
        ([1, 2], [([1], CHAIN[:1], ROOT), ([4, 5], CHAIN[3:5], CHAIN[2])]),
        ([3, 4], [([1, 2, 3], CHAIN[:3], ROOT)]),
        ([0, 1, 2, 3, 4], []),
    ],
)
def test_what_was_given_back_parts_it(
    given_back: list[int], left: list[tuple[list[int], list[BlockHash], BlockHash | None]]
) -> None:
    blocks = [Block(i) for i in range(1, 6)]
    run = pending(blocks)
    for i in given_back:
        blocks[i].generation += 1
    assert parts(run) == left


def test_null_blocks_hold_nothing() -> None:
    assert parts(pending([Block(0), Block(0), Block(7)])) == [([7], CHAIN[2:3], CHAIN[1])]
