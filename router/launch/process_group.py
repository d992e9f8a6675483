"""Processes as groups: start one at the head of its own group, signal and end all of it.

A replica's engine core lives in the group of its front, so that ending the group ends both. It
knows nothing of restarts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvindex.foundation.die_with_parent import wrap
from kvindex.foundation.errors import DependencyError

_LEFTOVER_WAIT_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a process is handed at its start: its standard input, and open files by number."""

    stdin: bytes | None = None
    fds: tuple[int, ...] = ()


async def spawn(
    argv: Sequence[str],
    log_file: Path,
    *,
    death_signal: signal.Signals,
    environ: Mapping[str, str],
    inherited: Inherited,
) -> asyncio.subprocess.Process:
    """Start a program at the head of its own process group, its output appended to a log.

    It gets `death_signal` when this process ends in whatever way; call from the main thread.
    """
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    with _open_log(log_file) as log:
        process = await asyncio.create_subprocess_exec(
            *wrap(argv, death_signal),
            stdin=nothing if inherited.stdin is None else pipe,
            stdout=log,
            stderr=log,
            pass_fds=inherited.fds,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        )
    if inherited.stdin is not None:
        assert process.stdin is not None, "asked for"
        process.stdin.write(inherited.stdin)
        process.stdin.close()
    return process


def _open_log(file: Path) -> BinaryIO:
    return file.open("ab")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that `end_group` can reap them.

    Without it they go to process 1, which in many containers reaps nothing: each killed replica
    would leave a zombie. Linux only; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


async def end_group(leader: int) -> None:
    """Kill what a dead leader left of its process group, and wait until it is gone."""
    deadline = time.monotonic() + _LEFTOVER_WAIT_S
    while True:
        left = signal_group(leader, signal.SIGKILL)
        _reap_group(leader)
        if not left or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.01)


def _reap_group(leader: int) -> None:
    """Collect the adopted members of a group that have ended."""
    try:
        while os.waitpid(-leader, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:
        return  # none of the group is ours (any more)


def send_signal(pid: int, sig: signal.Signals) -> None:
    """Signal one process; a process that is gone already is none of our business."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return


def signal_group(leader: int, sig: signal.Signals) -> bool:
    """Signal a process group; False when no member is left."""
    try:
        os.killpg(leader, sig)
    except ProcessLookupError:
        return False
    return True


def in_words(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_line(log_file: Path) -> str:
    """Return the last line of a log that says something, "" when there is none."""
    try:
        tail = log_file.read_bytes()[-8192:].decode(errors="replace")
    except OSError as error:
        raise DependencyError(f"{log_file}: {error.strerror}") from None
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1] if lines else ""
