"""What a trace may not be: each mistake is named with file, line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.traces.errors import TraceError
from sim.traces.trace import open_trace
from tests.sim.traces.samples import MAGAGENT, MINISWE, header, row, sample, write_lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def refusal(path: Path, *lines: object) -> str:
    """Return the error of reading a trace, without the folder."""
    with pytest.raises(TraceError) as caught:
        list(open_trace(write_lines(path, *lines)).rows())
    return str(caught.value).removeprefix(f"{path.parent}/")


def test_time_runs_forward(file: Path) -> None:
    message = refusal(file, header(), row(2000, [1]), row(1000, [2]))
    assert message == "t.jsonl:3: time runs backwards: 1 s after 2 s; sort the rows by time"


def test_an_id_has_one_parent(file: Path) -> None:
    message = refusal(file, header(), row(0, [1, 2, 3]), row(1, [4, 2]))
    assert message == (
        "t.jsonl:3: id 2 follows id 4 here and id 1 in an earlier row, but an id must stand for "
        "one whole prefix: are the ids local to a conversation? Then say "
        '"hash_scope": "local" in the header'
    )


def test_an_id_at_the_start_is_always_at_the_start(file: Path) -> None:
    message = refusal(file, header(), row(0, [1, 2]), row(1, [2]))
    assert "id 2 follows the start of the prompt here and id 1 in an earlier row" in message


def test_an_id_does_not_repeat_within_a_prompt(file: Path) -> None:
    assert ":2: id 1 follows id 1 here" in refusal(file, header(), row(0, [1, 1]))


def test_the_number_of_ids_follows_from_the_length(file: Path) -> None:
    message = refusal(file, header(), row(0, [1, 2], input_length=7))
    assert message == (
        "t.jsonl:2: 2 hash_ids for 7 tokens, but blocks of 4 with tail 'floor' give 1; the tail "
        "may be 'ceil', or lengths approximate (not counted by the tokenizer that made the "
        "blocks): say so in the header, or with --tail or --lengths"
    )
    message = refusal(file, header(), row(0, [1, 2, 3, 4], input_length=7))
    assert message.endswith("give 1; is the block size right?")


def test_a_partial_block_has_an_id_where_the_tail_says_so(file: Path) -> None:
    write_lines(file, header(tail="ceil"), row(0, [1, 2], input_length=7))
    assert [r.hash_ids for r in open_trace(file).rows()] == [(1, 2)]
    assert ":2: 2 hash_ids for 8" not in refusal(
        file, header(tail="ceil"), row(0, [1], input_length=8)
    )


def test_approximate_lengths_may_be_off_by_one_id_and_no_more(file: Path) -> None:
    loose = header(tail="ceil", lengths="approximate")
    write_lines(file, loose, row(0, [], input_length=1), row(1, [1, 2], input_length=4))
    assert len(list(open_trace(file).rows())) == 2
    message = refusal(file, loose, row(0, [1, 2, 3], input_length=4))
    assert message.endswith("give 1; is the block size right?")


@pytest.mark.parametrize("path", [MINISWE, MAGAGENT])
def test_traces_with_lengths_in_characters_need_to_be_told(path: Path) -> None:
    with pytest.raises(TraceError, match="state --block-size N --lengths approximate"):
        open_trace(path)
    with pytest.raises(TraceError, match=r"lengths approximate .*: say so in the header, or with"):
        list(open_trace(path, block_size=16).rows())
    assert "lengths are approximate" in sample(path).notes[-1]
    assert len(list(sample(path).rows())) > 400


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"input_length": -4, "hash_ids": None}, "input_length is negative (-4)"),
        ({"output_length": -1}, "output_length is negative (-1)"),
        ({"timestamp": "soon"}, "Expected `float`, got `str` - at `$.timestamp`"),
        ({"hash_ids": ["a"]}, "Expected `int`, got `str` - at `$.hash_ids[0]`"),
        ({"outcome": "lost"}, "Invalid enum value 'lost' - at `$.outcome`"),
    ],
)
def test_a_field_that_cannot_be_is_named(
    file: Path, fields: dict[str, object], problem: str
) -> None:
    assert refusal(file, header(), {**row(0, [1]), **fields}) == f"t.jsonl:2: {problem}"


def test_a_line_that_is_no_json_is_named(file: Path) -> None:
    assert refusal(file, header(), row(0, [1]), "{oops").startswith("t.jsonl:3: JSON is malformed")


def test_ids_without_a_block_size_are_an_error(file: Path) -> None:
    message = refusal(file, {"schema": "kvtrace/1"}, row(0, [1]))
    assert message == (
        "t.jsonl:2: hash_ids without a block size; state it in the header or --block-size"
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"block_size": 0}, "block_size must be at least 1 (is 0)"),
        ({"tail": "round"}, "Invalid enum value 'round' - at `$.tail`"),
        ({"blocksize": 4}, "Object contains unknown field `blocksize`"),
        ({"schema": "kvtrace/9"}, "Invalid enum value 'kvtrace/9' - at `$.schema`"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    file: Path, fields: dict[str, object], problem: str
) -> None:
    assert refusal(file, header(**fields), row(0, [1])) == f"t.jsonl:1: {problem}"


def test_a_file_is_not_contradicted(file: Path) -> None:
    write_lines(file, header(), row(0, [1]))
    with pytest.raises(TraceError, match="the file says block_size 4, --block-size says 8"):
        open_trace(file, block_size=8)
    assert open_trace(file, block_size=4).header.block_size == 4


def test_a_missing_or_empty_file_is_named(file: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl: cannot be read: No such file"):
        open_trace(file)
    file.write_text("\n\n")
    with pytest.raises(TraceError, match=r"t\.jsonl: the file is empty"):
        open_trace(file)
