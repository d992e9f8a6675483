"""The compiled step as a function of this process, made or loaded once.

What is kept lies in a folder named after the sources, so another version never runs old code.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from worker.config import cache_directory
from worker.cpu.compiled.object_code import Program, function_addresses, is_kept

logger = logging.getLogger("prefixfleet.worker.compiled")

CompiledStep = Callable[[int, int], object]
"""f(address of a step record, thread): other Python threads run meanwhile."""

_NAME = "step"
_unused = ctypes.create_string_buffer(8)
"""What the step would return, and raise, if it ever did."""


@cache
def compiled_step() -> CompiledStep:
    """Return the step as a C function; takes seconds once per machine, milliseconds after."""
    started = time.perf_counter()
    folder = kernel_folder()
    if folder is None:
        logger.warning("compiled kernels cannot be kept: no writable cache directory")
    with _one_at_a_time(folder):
        (address,) = function_addresses(_NAME, _written, folder=folder)
    logger.info("kernels ready took_s=%.1f cache=%s", time.perf_counter() - started, folder)
    arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *arguments)(address)
    unused = ctypes.addressof(_unused)
    return partial(function, unused, unused)


def _written() -> Program:
    from worker.cpu.compiled.step_program import write_step

    return write_step()


@contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Let one process compile, so that the others load what it has kept."""
    if folder is None:
        yield
        return
    if not is_kept(_NAME, folder):
        logger.info("compiling kernels for this CPU; once, it takes some seconds")
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@cache
def kernel_folder() -> Path | None:
    """Return where code compiled from these sources is kept; None when nothing can be written."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(base) if base else cache_directory(None) / "kernels"
    folder = folder / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
