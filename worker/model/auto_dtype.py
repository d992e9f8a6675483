"""Which precision "auto" means on this machine; torch-free, so that a launcher can ask."""

from __future__ import annotations

from typing import Literal

from worker.cpu.machine import has_native_bfloat16


def auto_dtype() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where the CPU multiplies bfloat16 matrices natively, else float32.

    Without such instructions a prefill in bfloat16 takes longer than in float32, and so does a
    batch of decodes; only a single decode stream gains, because it reads half as many bytes.
    """
    return "bfloat16" if has_native_bfloat16() else "float32"
