"""A trace file as numbered lines, whatever it is compressed with.

The compression is recognised by the file's first bytes, not by its name. It knows no format.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from sim.traces.errors import TraceError
from sim.traces.zstd import create_zstd, open_zstd

DecodedT = TypeVar("DecodedT")

_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\x00"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_UTF8_MARK = b"\xef\xbb\xbf"


class TraceSource:
    """One file; `lines()` opens it anew each time and holds one line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number from 1, content without line end), blank lines left out.

        Raises TraceError when the file is missing, unreadable or ends within its compression.
        """
        try:
            with self._open() as stream:
                for number, raw in enumerate(stream, start=1):
                    if line := raw.strip().removeprefix(_UTF8_MARK):
                        yield number, line
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise TraceError(self.path, f"cannot be read: {_reason(error)}") from error

    def first_line(self) -> tuple[int, bytes]:
        """Return the first line that is not blank; TraceError when there is none."""
        for number, line in self.lines():
            return number, line
        raise TraceError(self.path, "the file is empty")

    def error(self, line: int, problem: str) -> TraceError:
        """Return the error that a line deserves."""
        return TraceError(self.path, problem, line=line)

    def decode(self, decoder: msgspec.json.Decoder[DecodedT], line: int, data: bytes) -> DecodedT:
        """Decode one line of JSON; TraceError names the line and what is wrong with it."""
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as error:
            raise self.error(line, str(error)) from None

    def _open(self) -> IO[bytes]:
        with self.path.open("rb") as stream:
            magic = stream.read(len(_XZ_MAGIC))
        if magic.startswith(_GZIP_MAGIC):
            return cast("IO[bytes]", gzip.open(self.path, "rb"))
        if magic == _XZ_MAGIC:
            return lzma.open(self.path, "rb")
        if magic.startswith(_ZSTD_MAGIC):
            return open_zstd(self.path)
        return self.path.open("rb")


def open_for_writing(file: Path, *, target: Path) -> IO[bytes]:
    """Create a file, compressed as the suffix of `target` says (.gz, .xz, .zst).

    Equal content gives equal bytes. Errors name `target`, which the file is to become.
    """
    try:
        if target.suffix == ".gz":
            # A fixed time and no file name in the header: equal rows give equal bytes.
            return cast("IO[bytes]", _OwningGzip(file.open("wb")))
        if target.suffix == ".xz":
            return lzma.open(file, "wb")
        if target.suffix == ".zst":
            return create_zstd(file, target=target)
        return file.open("wb")
    except OSError as error:
        raise TraceError(target, f"cannot be written: {_reason(error)}") from error


class _OwningGzip(gzip.GzipFile):
    """A gzip stream that closes the file below it."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(filename="", mode="wb", fileobj=stream, mtime=0)
        self._stream = stream

    def close(self) -> None:
        super().close()
        self._stream.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
