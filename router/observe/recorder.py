"""Records the traffic as a trace that the simulator replays: prefixes and lengths, never text.

Of a prompt only its chain of blocks is kept, unsalted, so that a replay can ask what another
isolation would cost, and renamed under a key that dies with the recording: nobody can test a guess
of a prompt against it. Client salts and sessions are renamed the same way. It decides nothing.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal

import msgspec

from kvindex.foundation.errors import ConfigError
from kvindex.hashing import HashScheme, hash_tokens

log = logging.getLogger("prefixfleet.router.recorder")

Outcome = Literal["answered", "refused", "failed", "cancelled"]

_MAX_HELD = 100_000
_MAX_PENDING = 1_000
_encoder = msgspec.json.Encoder()


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request, refused ones too; `arrived_at` is monotonic, `prompts` in tokens."""

    arrived_at: float
    prompts: Sequence[Sequence[int]]
    num_prompt_tokens: int
    num_output_tokens: int
    block_size: int | None
    tenant: str
    model: str
    priority: int
    group: str
    client_salt: str | None
    session: str | None
    outcome: Outcome


class _Header(msgspec.Struct, kw_only=True):
    schema: str = "kvtrace/1"
    block_size: int | None
    hash_scope: str = "global"
    tail: str = "floor"
    time_unit: str = "s"
    source: str = "gateway"


class _Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    session_id: str | None = None
    tenant: str
    model: str
    priority: int = 0
    group: str
    client_salt: str | None = None
    outcome: Outcome


class Recorder:
    """Writes one file, in order of arrival, until it has `max_bytes`; an older file is kept.

    Rows wait in memory for requests that came earlier and still run; hashing and writing are done
    by a thread of its own. What a slow disk cannot take is dropped and counted.
    """

    def __init__(self, path: Path, *, max_bytes: int, now: float, key: bytes | None = None) -> None:
        """Create the file; raise ConfigError when that cannot be done.

        `now` is the instant that the file counts from. Files with one `key` are one recording.
        """
        self._max_bytes = max_bytes
        self._started_at = now
        self._file = _create(path)
        self.path = Path(self._file.name)
        self._key = key or secrets.token_bytes(32)
        self._thread = ThreadPoolExecutor(1, "record")
        self._open: deque[int] = deque()
        self._ended: dict[int, Recorded | None] = {}
        self._num_arrived = 0
        self._pending = threading.BoundedSemaphore(_MAX_PENDING)
        self._num_bytes = 0
        self._block_size: int | None = None
        self.num_rows = 0
        self._num_given_up = 0
        self._num_past_end = 0  # The thread's own count.

    @property
    def num_dropped(self) -> int:
        """Requests that are missing: too long, too many, or past the end of the file."""
        return self._num_given_up + self._num_past_end

    def arrived(self) -> int:
        """Note that a request has come in; return the number to `end` it with."""
        self._num_arrived += 1
        self._open.append(self._num_arrived)
        return self._num_arrived

    def end(self, number: int, row: Recorded | None) -> None:
        """Record a request that has ended, None for one of which nothing is known."""
        if not self._open or number < self._open[0]:
            return  # It was given up because it ran for so long.
        self._ended[number] = row
        while self._open and self._open[0] in self._ended:
            self._submit(self._ended.pop(self._open.popleft()))
        if len(self._ended) > _MAX_HELD:
            self._release_held()

    def close(self) -> None:
        """Write what is left, also behind requests that still run, and close the file."""
        self._release_held()
        self._thread.shutdown(wait=True)
        self._file.close()
        if self.num_dropped:
            log.warning("recording incomplete rows=%d dropped=%d", self.num_rows, self.num_dropped)

    def _release_held(self) -> None:
        """Write what has ended although earlier requests still run; those are dropped."""
        for number in self._open:
            if number in self._ended:
                self._submit(self._ended[number])
            else:
                self._num_given_up += 1
        self._open.clear()
        self._ended.clear()

    def _submit(self, row: Recorded | None) -> None:
        if row is None:
            return
        if self._pending.acquire(blocking=False):
            self._thread.submit(self._write, row)
        else:
            self._num_given_up += 1

    def _write(self, recorded: Recorded) -> None:
        """Hash and write one request: a row for each of its prompts."""
        try:
            if self._num_bytes >= self._max_bytes:
                self._num_past_end += 1
                return
            if self._num_bytes == 0:
                self._block_size = recorded.block_size
                self._put(_encoder.encode(_Header(block_size=self._block_size)))
            for row in self._rows(recorded):
                self._put(_encoder.encode(row))
                self.num_rows += 1
            self._file.flush()
        except OSError as error:
            log.error("recording failed reason=%r", str(error))
            self._max_bytes = 0
        finally:
            self._pending.release()

    def _rows(self, recorded: Recorded) -> list[_Row]:
        prompts: Sequence[Sequence[int] | None] = recorded.prompts or [None]
        return [
            _Row(
                timestamp=round(recorded.arrived_at - self._started_at, 6),
                input_length=recorded.num_prompt_tokens if prompt is None else len(prompt),
                output_length=recorded.num_output_tokens // len(prompts),
                hash_ids=self._hash_ids(prompt, recorded) if prompt is not None else None,
                session_id=self._name(recorded.session),
                tenant=recorded.tenant,
                model=recorded.model,
                priority=recorded.priority,
                group=recorded.group,
                client_salt=self._name(recorded.client_salt),
                outcome=recorded.outcome,
            )
            for prompt in prompts
        ]

    def _hash_ids(self, prompt: Sequence[int], recorded: Recorded) -> list[int] | None:
        """Rename the blocks of a prompt; models share none, and another block size has no ids."""
        if self._block_size is None or recorded.block_size != self._block_size:
            return None
        key = hashlib.blake2b(recorded.model.encode(), key=self._key, digest_size=32).digest()
        chain = hash_tokens(prompt, HashScheme(block_size=self._block_size))
        return [
            int.from_bytes(hashlib.blake2b(block, key=key, digest_size=8).digest(), "big") >> 1
            for block in chain
        ]

    def _name(self, value: str | None) -> str | None:
        if value is None:
            return None
        return hashlib.blake2b(value.encode(), key=self._key, digest_size=8).hexdigest()

    def _put(self, line: bytes) -> None:
        self._num_bytes += self._file.write(line + b"\n")


def _create(path: Path) -> IO[bytes]:
    """Open a file that is not there yet: the path itself, or with a number before its suffix."""
    number = 0
    while True:
        free = path if not number else path.with_stem(f"{path.stem}-{number}")
        try:
            file = free.open("xb")
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"router.record.path: {free}: {error.strerror}; name a file in a folder that exists"
            ) from None
        else:
            log.info("recording path=%s", free)
            return file
