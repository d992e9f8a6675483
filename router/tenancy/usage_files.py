"""Usage as files: a line of JSON for each request, in files that are finished by size and by age.

Each process writes a file of its own, locked and named `*.jsonl.open`; finished it is `*.jsonl` and
never written again, so whoever collects files takes those. What a process that was killed has left
open is finished by the next one that starts. It knows no tenants and no prices.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvindex.foundation.errors import ConfigError
from router.config import UsageFilesConfig
from router.tenancy.usage import UsageRecord

log = logging.getLogger("prefixfleet.router.usage")

_FINISHED, _OPEN, _NEW = ".jsonl", ".jsonl.open", ".jsonl.new"
_RETRY_S = 1.0
_encoder = msgspec.json.Encoder()


class UsageFiles:
    """Writes in a thread of its own, in the order of `write`; `owner` goes into the files' names.

    Lines that the disk does not take are kept and tried again.
    """

    def __init__(self, config: UsageFilesConfig, *, owner: str) -> None:
        """Finish what dead processes have left; raise ConfigError for a folder that cannot be."""
        self._config = config
        self._owner = owner
        self._folder = Path(config.folder)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._file: _OpenFile | None = None
        self._num_files = 0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in sorted(self._folder.glob(f"*{_OPEN}")):
                _finish_if_left(file)
        except OSError as error:
            raise ConfigError(
                f"router.usage_files.folder: {self._folder}: {error.strerror}; name a folder that "
                "can be written to"
            ) from None
        self._thread = threading.Thread(target=self._run, name="usage-files", daemon=True)
        self._thread.start()

    def write(self, record: UsageRecord) -> None:
        """Have a record written; returns at once."""
        self._lines.put(_encoder.encode(record) + b"\n")

    def close(self) -> None:
        """Write what is left and finish the file."""
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            lines, ending = self._next_lines()
            while lines and not self._append(lines):
                if ending:
                    log.error("usage files: %d lines are lost, the disk takes none", len(lines))
                    break
                time.sleep(_RETRY_S)
            if self._file is not None and (ending or self._file.is_old(self._config.max_age_s)):
                self._finish()

    def _next_lines(self) -> tuple[list[bytes], bool]:
        """Wait for lines, or until the file is old; return all there are, and whether to end."""
        wait_s = self._file.left_s(self._config.max_age_s) if self._file is not None else None
        lines: list[bytes] = []
        try:
            line = self._lines.get(timeout=wait_s)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return lines, False
        return lines, True

    def _append(self, lines: list[bytes]) -> bool:
        """Write lines, taking off the list what is written; False when the disk takes no more."""
        try:
            while lines:
                if self._file is None:
                    self._file = self._create()
                fitting = self._file.num_fitting(lines, self._config.max_bytes)
                self._file.append(b"".join(lines[:fitting]))
                del lines[:fitting]
                if lines:
                    self._finish()
        except OSError as error:
            log.error("usage files: %s: %s; trying again", self._folder, error.strerror)
            return False
        return True

    def _create(self) -> _OpenFile:
        self._num_files += 1
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"usage-{started}-{self._owner}-{self._num_files}{_OPEN}"
        return _OpenFile(self._folder / name)

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.finish()
            except OSError as error:
                log.error("usage files: %s stays open: %s", file.path, error.strerror)


class _OpenFile:
    """A file that is being written, locked as long as its process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        new = path.with_name(path.name.removesuffix(_OPEN) + _NEW)
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        new.rename(path)  # Under this name it is nobody's who is not locked out.
        self._num_bytes = 0
        self._started_at = time.monotonic()

    def left_s(self, max_age_s: float) -> float:
        return max(0.0, self._started_at + max_age_s - time.monotonic())

    def is_old(self, max_age_s: float) -> bool:
        return not self.left_s(max_age_s)

    def num_fitting(self, lines: list[bytes], max_bytes: int) -> int:
        """Return how many lines still fit; an empty file takes one of any length."""
        total, number = self._num_bytes, 0
        for line in lines:
            total += len(line)
            if total > max_bytes and (number or self._num_bytes):
                break
            number += 1
        return number

    def append(self, data: bytes) -> None:
        """Write all of it, or nothing: a line is never torn."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self._num_bytes)
            os.lseek(self._fd, self._num_bytes, os.SEEK_SET)
            raise
        self._num_bytes += written

    def finish(self) -> None:
        """Let go of the file under its final name."""
        try:
            os.fsync(self._fd)
            self.path.rename(_finished(self.path))
        finally:
            os.close(self._fd)


def _finished(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(_OPEN) + _FINISHED)


def _finish_if_left(path: Path) -> None:
    """Finish a file whose process is gone; a last line without its end is not there."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return  # Finished by another process that starts just now.
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # Its process lives.
        data = file.read()
        whole = data.rfind(b"\n") + 1
        file.truncate(whole)
        if len(data) > whole:
            log.warning("usage files: %s ended within a line, which is dropped", path)
        path.rename(_finished(path))
