"""The last good directory on disk, so that a gateway that starts without Redis knows its keys.

The file holds hashes of keys, never keys, and only its user may read it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import msgspec

from router.tenancy.stored import StoredDirectory

log = logging.getLogger("prefixfleet.router.tenancy")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway knew: the stored directory, and how many gateways shared the limits."""

    directory: StoredDirectory | None = None
    num_gateways: int = 1


def load_snapshot(file: Path) -> Snapshot:
    """Read a snapshot; an empty one where there is none or it is damaged, which is logged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Snapshot)
    except FileNotFoundError:
        return Snapshot()
    except (OSError, msgspec.DecodeError) as error:
        log.error("snapshot %s cannot be used: %s", file, error)
        return Snapshot()


def save_snapshot(file: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot in one step, mode 0600; a full disk is logged and costs nothing else."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(fd, "wb") as stream:
            stream.write(msgspec.json.encode(snapshot))
        os.replace(temporary, file)
    except OSError as error:
        log.error("snapshot %s cannot be written: %s", file, error)
