"""Reading and writing zstd, which Python 3.11 has no module for: by the package zstandard.

The package is an extra, asked for only when a file needs it. The reader takes any number of frames
and, unlike the package's own, reports a file that ends within one: a trace cut short must not pass
for a short trace.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from sim.traces.errors import TraceError

_CHUNK_BYTES = 1 << 17


def open_zstd(path: Path) -> IO[bytes]:
    """Open a file for reading; TraceError when the package is missing."""
    return cast("IO[bytes]", io.BufferedReader(_FrameReader(path, _zstandard(path))))


def create_zstd(file: Path, *, target: Path) -> IO[bytes]:
    """Open a file for writing; TraceError, about `target`, when the package is missing."""
    return cast("IO[bytes]", _zstandard(target).open(file, "wb"))


def _zstandard(path: Path) -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise TraceError(
            path,
            "zstd needs the package zstandard: `pip install prefixfleet[sim]`, or recompress the "
            "file with gzip or xz",
        ) from None
    return zstandard


class _FrameReader(io.RawIOBase):
    """The content of all frames of a file; EOFError when the last one is not whole."""

    def __init__(self, path: Path, zstandard: ModuleType) -> None:
        self._file = path.open("rb")
        self._zstandard = zstandard
        self._frame: Any = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._content:
            if not (data := self._file.read(_CHUNK_BYTES)):
                if self._frame is not None:
                    raise EOFError("the file ends within a zstd frame")
                return 0
            self._content = memoryview(self._decompress(data))
        num_bytes = min(len(buffer), len(self._content))
        buffer[:num_bytes] = self._content[:num_bytes]
        self._content = self._content[num_bytes:]
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompress(self, data: bytes) -> bytes:
        """Feed a part of the file; `_frame` stays set while a frame is unfinished."""
        parts = []
        while data:
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        return b"".join(parts)
