"""Compiles the step for this CPU, or loads what an earlier start has compiled.

The cache is named after the sources, so another version never runs old code; numba itself tells
CPUs apart in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numba
from numba import carray, cfunc, types
from numba.np import numpy_support

from worker.config import cache_directory
from worker.cpu.compiled.step import run
from worker.cpu.compiled.step_record import STEP

logger = logging.getLogger("prefixfleet.worker.compiled")

CompiledStep = Callable[[int, int], None]
"""f(address of a step record, thread): other Python threads run meanwhile."""


@cache
def compiled_step() -> CompiledStep:
    """Return the step as a C function; takes seconds once per machine, milliseconds after."""
    started = time.perf_counter()
    folder = kernel_folder()
    if folder is None:
        logger.warning("compiled kernels cannot be kept: no writable cache directory")
    else:
        numba.config.CACHE_DIR = str(folder)
    with _one_at_a_time(folder):
        record = types.CPointer(numpy_support.from_dtype(STEP))
        compiled = cfunc(types.void(record, types.intp), cache=folder is not None)(_entry)
    logger.info("kernels ready took_s=%.1f cache=%s", time.perf_counter() - started, folder)
    function: CompiledStep = compiled.ctypes
    return function


@contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Let one process compile, so that the others load what it has kept."""
    if folder is None:
        yield
        return
    if not any(folder.rglob("*.nbi")):
        logger.info("compiling kernels for this CPU; once, it takes some seconds")
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _entry(step, thread):  # type: ignore[no-untyped-def]
    run(carray(step, (1,))[0], thread)


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
