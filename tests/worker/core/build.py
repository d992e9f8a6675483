"""Builders for tests of core processes: specs of scripted cores, and a look at processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from engine.config import EngineConfig
from worker.core.spec import CoreSpec, ScriptedModel

CONFIG = EngineConfig(slab_blocks=8, block_size=4, check_integrity=True, watermark=0.0)


def scripted_spec(**scripted: object) -> CoreSpec:
    """A core of 64 blocks without a model; it publishes no events."""
    model = ScriptedModel(num_blocks=64, **scripted)  # type: ignore[arg-type]
    return CoreSpec(replica_id="r0", engine=CONFIG, scripted=model, publish_events=False)


def children(parent: int | None = None) -> set[int]:
    """Process ids of the children of a process, this one by default."""
    tasks = Path(f"/proc/{parent or os.getpid()}/task").iterdir()
    found: set[int] = set()
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # A thread that has ended.
            found.update(map(int, (task / "children").read_text().split()))
    return found


def exists(pid: int) -> bool:
    """Whether a process, dead but not waited for included, exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
