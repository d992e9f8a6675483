"""Keeps memory profiles on disk, so that a restart need not measure again before it serves.

One small JSON file per (model, device, settings that matter). A file that cannot be read, or is of
another form, counts as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from worker.gpu.memory import MemoryProfile

_log = logging.getLogger("prefixfleet.worker.gpu")


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a memory profile depends on."""

    model_digest: str
    device_name: str
    total_bytes: int
    dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    graph_mode: str
    software: str

    @property
    def file_name(self) -> str:
        """Name of the file that keeps the profile."""
        return f"{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]}.json"


class ProfileStore:
    """Profiles in a folder, which need not exist; without one, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: ProfileKey) -> MemoryProfile | None:
        """Return the profile kept under a key."""
        if self._folder is None:
            return None
        try:
            return msgspec.json.decode(
                (self._folder / key.file_name).read_bytes(), type=MemoryProfile
            )
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("memory profile unreadable file=%s error=%s", key.file_name, error)
            return None

    def put(self, key: ProfileKey, profile: MemoryProfile) -> None:
        """Keep a profile; that it cannot be written is logged and changes nothing."""
        if self._folder is None:
            return
        partial = self._folder / f"{key.file_name}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(profile))
            partial.replace(self._folder / key.file_name)
        except OSError as error:
            _log.warning("memory profile not kept file=%s error=%s", key.file_name, error)

    def forget(self, key: ProfileKey) -> None:
        """Drop the profile of a key, if there is one."""
        if self._folder is not None:
            (self._folder / key.file_name).unlink(missing_ok=True)
