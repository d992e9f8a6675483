"""Prompts made of block ids agree exactly as far as the ids do."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashChain, HashScheme
from sim.live.prompts import PromptMaker
from sim.live.shrink import shrunk_header, shrunk_rows
from sim.traces.row import TraceHeader, TraceRow
from tests.sim.live.conftest import CONVERSATION, SYNTHETIC, first_rows
from tests.sim.replaying import BLOCK_SIZE, HEADER, arrivals, row

MAKER = PromptMaker(HEADER)


def common(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens are equal."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_agree_as_far_as_their_ids_do() -> None:
    first, second = MAKER.prompt(row(1, 0.0, [1, 2, 3])), MAKER.prompt(row(2, 0.0, [1, 2, 4]))
    assert len(first) == 3 * BLOCK_SIZE + 1
    assert common(first, second) == 2 * BLOCK_SIZE
    assert all(0 <= token_id < 256 for token_id in first)


def test_tokens_beyond_the_last_id_are_the_rows_own() -> None:
    first = MAKER.prompt(row(1, 0.0, [1], input_length=3 * BLOCK_SIZE))
    second = MAKER.prompt(row(2, 0.0, [1], input_length=3 * BLOCK_SIZE))
    assert common(first, second) == BLOCK_SIZE
    assert first == MAKER.prompt(row(1, 0.0, [1], input_length=3 * BLOCK_SIZE))


def test_a_partial_block_with_an_id_is_the_beginning_of_that_block() -> None:
    maker = PromptMaker(TraceHeader(block_size=BLOCK_SIZE, tail="ceil"))
    part = maker.prompt(row(1, 0.0, [1, 2], input_length=BLOCK_SIZE + 5))
    assert part == maker.prompt(row(2, 0.0, [1, 2], input_length=2 * BLOCK_SIZE))[: BLOCK_SIZE + 5]


def test_prompts_are_the_same_in_every_process_and_other_ones_for_another_seed() -> None:
    assert MAKER.prompt(row(1, 0.0, [7]))[:6] == [89, 42, 175, 48, 76, 121]
    other = PromptMaker(HEADER, seed=1).prompt(row(1, 0.0, [7]))
    assert common(MAKER.prompt(row(1, 0.0, [7])), other) == 0


@pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC], ids=["conversation", "synthetic"])
def test_the_engines_hash_chains_share_what_the_replays_named_blocks_share(
    path: Path,
) -> None:
    header, rows = first_rows(path, 60)
    maker, scheme = PromptMaker(header), HashScheme(block_size=BLOCK_SIZE)
    hashed: dict[bytes, bytes] = {}
    for arrival, each in zip(arrivals(rows, header), rows, strict=True):
        chain = HashChain(scheme)
        chain.extend(maker.prompt(each))
        assert len(chain.hashes) == len(arrival.hashes)
        for name, block_hash in zip(arrival.hashes, chain.hashes, strict=True):
            assert hashed.setdefault(name, block_hash) == block_hash
    assert len(set(hashed.values())) == len(hashed)


def test_a_trace_is_shrunk_with_its_blocks() -> None:
    header = TraceHeader(block_size=512, tail="ceil")
    rows = [
        TraceRow(line=1, arrival_s=0.0, input_length=512, output_length=320, hash_ids=(0,)),
        TraceRow(line=2, arrival_s=0.0, input_length=1100, output_length=5, hash_ids=(0, 1, 2)),
        TraceRow(line=3, arrival_s=0.0, input_length=513, output_length=5, hash_ids=(0, 3)),
    ]
    small = shrunk_header(header, 32)
    assert small.block_size == 16
    lengths = [(r.input_length, r.output_length) for r in shrunk_rows(rows, header, 32)]
    assert lengths == [(16, 10), (34, 1), (17, 1)]
    assert [small.num_blocks(length) for length, _ in lengths] == [1, 3, 2]


def test_blocks_that_cannot_be_divided_so_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a divisor of the trace's block size, 512"):
        shrunk_header(TraceHeader(block_size=512), 3)
    with pytest.raises(ConfigError, match="--shrink 2"):
        shrunk_header(TraceHeader(), 2)
