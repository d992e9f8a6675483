"""What this machine offers: cores, memory, matrix instructions. It decides nothing.

Numbers respect the container: cgroup limits and CPU affinity, not only the hardware.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_MATRIX_BFLOAT16 = frozenset({"amx_bf16"})
_NATIVE_BFLOAT16 = _MATRIX_BFLOAT16 | {"avx512_bf16"}


def num_cores() -> int:
    """Return how many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Return the memory that can be taken without swapping, in bytes.

    The kernel's MemAvailable, capped by what is left of the cgroup's limit.
    """
    available = _meminfo_available()
    limit = _read_cgroup("memory.max")
    used = _read_cgroup("memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def has_native_bfloat16() -> bool:
    """Tell whether matrix products in bfloat16 run on instructions of their own (x86, Linux)."""
    return not _NATIVE_BFLOAT16.isdisjoint(_cpu_flags())


def has_matrix_bfloat16() -> bool:
    """Tell whether one of those multiplies whole tiles of a matrix (x86, Linux)."""
    return not _MATRIX_BFLOAT16.isdisjoint(_cpu_flags())


def _cpu_flags() -> list[str]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return []
    return next((line.split() for line in lines if line.startswith("flags")), [])


def _meminfo_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_cgroup(name: str) -> int | None:
    """Return a number of the unified cgroup; None when there is none or it says "max"."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
