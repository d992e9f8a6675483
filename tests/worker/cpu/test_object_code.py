"""Machine code that is kept, found again, and made anew when what was kept is damaged."""

from __future__ import annotations

import ctypes
from pathlib import Path

from worker.cpu.compiled.object_code import Program, function_addresses, is_kept

ASSEMBLY = """
define i64 @twice(i64 %x) { %y = add i64 %x, %x  ret i64 %y }
define i64 @next(i64 %x) { %y = add i64 %x, 1  ret i64 %y }
"""


def results_of(addresses: tuple[int, ...], argument: int) -> list[int]:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return [function(address)(argument) for address in addresses]


class Writer:
    """Writes the program, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self) -> Program:
        self.num_asked += 1
        return Program(ASSEMBLY, ["next", "twice"])


def test_functions_come_in_the_order_of_their_names() -> None:
    assert results_of(function_addresses("sums", Writer(), folder=None), 20) == [21, 40]


def test_code_that_was_kept_is_not_written_again(tmp_path: Path) -> None:
    write = Writer()
    assert not is_kept("sums", tmp_path)
    for _ in range(2):
        assert results_of(function_addresses("sums", write, folder=tmp_path), 5) == [6, 10]
    assert is_kept("sums", tmp_path)
    assert write.num_asked == 1


def test_damaged_code_is_made_anew(tmp_path: Path) -> None:
    write = Writer()
    function_addresses("sums", write, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    for damaged in (content[:-1], content[:40], b""):
        file.write_bytes(damaged)
        assert results_of(function_addresses("sums", write, folder=tmp_path), 7) == [8, 14]
        assert file.read_bytes() == content
    assert write.num_asked == 4
