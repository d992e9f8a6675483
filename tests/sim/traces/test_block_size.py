"""A block size is inferred only where a single one explains the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.traces.errors import TraceError
from sim.traces.trace import Trace, open_trace
from tests.sim.traces.samples import CLAUDE_CODE, CONVERSATION_1000, SYNTHETIC_1000, write_lines


def mooncake(path: Path, *rows: tuple[int, int], block_size: int | None = None) -> Trace:
    """Write rows of (input length, number of ids) with ids of their own."""
    next_id = iter(range(10_000))
    lines = [
        {
            "timestamp": 0,
            "input_length": length,
            "output_length": 1,
            "hash_ids": [next(next_id) for _ in range(num_ids)],
        }
        for length, num_ids in rows
    ]
    return open_trace(write_lines(path, *lines), block_size=block_size)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


@pytest.mark.parametrize(
    ("path", "note"),
    [
        (CONVERSATION_1000, "block size 512, tail 'ceil': all that fits the first 1000 rows"),
        (SYNTHETIC_1000, "block size 512, tail 'ceil': all that fits the first 1000 rows"),
        (CLAUDE_CODE, "block size 64, tail 'floor': all that fits the first 2000 rows"),
    ],
)
def test_recorded_traces_leave_one_block_size(path: Path, note: str) -> None:
    trace = open_trace(path)
    assert trace.notes == ("format mooncake, guessed from the first line", note)


def test_rows_that_fit_several_sizes_are_an_error_with_the_choice(file: Path) -> None:
    with pytest.raises(TraceError) as caught:
        mooncake(file, (1000, 2))
    assert str(caught.value).endswith(
        "block size unknown: the rows fit 500 to 999 with tail 'ceil', or 334 to 500 with tail "
        "'floor'; state it with --block-size N (and --tail)"
    )


def test_a_stated_size_needs_no_proof_but_must_fit(file: Path) -> None:
    trace = mooncake(file, (1000, 2), block_size=512)
    assert (trace.header.block_size, trace.header.tail) == (512, "ceil")
    trace = mooncake(file, (600, 2), (1000, 2), block_size=300)
    with pytest.raises(TraceError, match=r"t\.jsonl:2: 2 hash_ids for 1000 tokens, but blocks of"):
        list(trace.rows())


def test_a_row_that_fits_no_size_is_named(file: Path) -> None:
    rows = [(100, 7), (90, 6), (33, 3), (64, 4), (70, 9), (16, 1)]
    with pytest.raises(TraceError) as caught:
        mooncake(file, *rows)
    assert str(caught.value).endswith(
        "t.jsonl:5: 9 hash_ids for 70 tokens, but the rows before leave only blocks of 16 with "
        "tail 'ceil'; if lengths were not counted by the tokenizer that made the blocks, state "
        "--block-size N --lengths approximate"
    )
    # Told the size, the rest of the rows is read as well, and the same row is named.
    with pytest.raises(TraceError, match=r"t\.jsonl:5: 9 hash_ids .* give 5; is the block size"):
        list(mooncake(file, *rows, block_size=16).rows())


def test_whole_blocks_do_not_tell_the_tail(file: Path) -> None:
    trace = mooncake(file, (1024, 2), (512, 1), block_size=512)
    assert (trace.header.block_size, trace.header.tail) == (512, "ceil")


def test_rows_without_ids_are_a_trace_of_lengths(file: Path) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 1}
    trace = open_trace(write_lines(file, line))
    assert trace.header.block_size is None
    assert trace.notes[-1] == "no hash_ids: lengths only, hits unknown"
    assert [row.hash_ids for row in trace.rows()] == [None]


def test_approximate_lengths_leave_the_size_to_be_stated(file: Path) -> None:
    write_lines(file, {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]})
    with pytest.raises(TraceError, match="approximate lengths do not tell it; add --block-size"):
        open_trace(file, lengths="approximate")
