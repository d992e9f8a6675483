"""Compression, and the canonical form written and read back."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from sim.traces.errors import TraceError
from sim.traces.row import TraceHeader, TraceRow
from sim.traces.trace import open_trace
from sim.traces.writer import TraceWriter, write_trace
from tests.sim.traces.samples import CONVERSATION_1000, MAGAGENT, header, row, sample, write_lines


def rows_of(path: Path) -> list[TraceRow]:
    return [msgspec.structs.replace(row, line=0) for row in sample(path).rows()]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str) -> None:
    source = sample(MAGAGENT)
    path = tmp_path / f"copy.jsonl{suffix}"
    assert write_trace(path, source.header, source.rows()) == 746
    copy = open_trace(path)
    assert copy.header == source.header
    assert rows_of(path) == rows_of(MAGAGENT)
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_equal_rows_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{name}.jsonl{suffix}" for name in ("one", "two")]
    for path in paths:
        write_trace(
            path, TraceHeader(block_size=512, tail="ceil"), sample(CONVERSATION_1000).rows()
        )
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_every_field_survives_a_file(tmp_path: Path) -> None:
    original = TraceRow(
        line=2,
        arrival_s=1.2345,
        input_length=9,
        output_length=4,
        hash_ids=(1, 2),
        request_id="r",
        session_id="s",
        parent_id="p",
        delay_s=0.5,
        tenant="t",
        model="m",
        priority=-1,
        output_hash_ids=(3,),
        group="g",
        client_salt="c",
        outcome="cancelled",
    )
    bare = TraceRow(line=3, arrival_s=2.0, input_length=9, output_length=4)
    path = tmp_path / "t.jsonl"
    write_trace(path, TraceHeader(block_size=4, time_unit="s"), [original, bare])
    assert list(open_trace(path).rows()) == [original, bare]


def test_compression_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "plain", header(), row(0, [1])).read_bytes()
    for number, data in enumerate(
        (plain, gzip.compress(plain), lzma.compress(plain), zstandard.compress(plain))
    ):
        path = tmp_path / f"{number}.dat"
        path.write_bytes(data)
        assert len(list(open_trace(path).rows())) == 1


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, zstandard.compress])
def test_a_file_that_ends_too_early_is_an_error(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = write_lines(tmp_path / "t", header(), *(row(n, [n, 1000 + n]) for n in range(500)))
    path.write_bytes(compress(path.read_bytes())[:-20])
    with pytest.raises(TraceError, match=r"t: cannot be read: .* end"):
        list(open_trace(path).rows())


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, zstandard.compress])
def test_a_file_may_be_appended_to(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "t"
    parts = [header(), row(0, [1]), row(1, [1, 2])]
    path.write_bytes(b"".join(compress(f"{json.dumps(part)}\n".encode()) for part in parts))
    assert [row.hash_ids for row in open_trace(path).rows()] == [(1,), (1, 2)]


def test_damage_inside_a_file_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", header(), *(row(n, [n, 1000 + n]) for n in range(500)))
    data = bytearray(zstandard.compress(path.read_bytes()))
    data[len(data) // 2 :] = b"\xff" * (len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(TraceError, match="t: cannot be read: "):
        list(open_trace(path).rows())


def test_without_the_zstd_package_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.zst"
    path.write_bytes(zstandard.compress(b"{}"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match=r"t\.zst: zstd needs .* `pip install prefixfleet\[sim\]`"):
        open_trace(path)
    with pytest.raises(TraceError, match=r"out\.zst: zstd needs the package zstandard"):
        write_trace(tmp_path / "out.zst", TraceHeader(), [])


def test_a_failed_conversion_leaves_no_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", header(), row(5, [1]), row(0, [2]))
    trace = open_trace(path)
    target = tmp_path / "out.jsonl"
    with pytest.raises(TraceError, match="time runs backwards"):
        write_trace(target, trace.header, trace.rows())
    assert [child.name for child in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_full_disk_is_named() -> None:
    with pytest.raises(TraceError, match="/dev/full: cannot be written: No space left on device"):
        TraceWriter(Path("/dev/full"), TraceHeader())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written: No such file or directory"):
        write_trace(tmp_path / "no" / "t.jsonl.gz", TraceHeader(), [])
