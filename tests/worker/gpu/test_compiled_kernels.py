"""Every kernel compiles for real GPUs, within what such a GPU has; nobody needs to own one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
"""Shared memory that a program may use, by compute capability (CUDA C++ Programming Guide)."""

MAX_SPILLED_BYTES = 64
"""A few words of a thread's registers in memory cost less than a smaller tile would."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bfloat16"), (90, "bfloat16"), (89, "float16")]
)
def test_kernels_compile_and_fit(capability: int, dtype: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.gpu.compile_kernels", str(capability), dtype],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == {
        "_add_rms_norm",
        "_choose",
        "_decode",
        "_merge",
        "_prefill",
        "_rms_norm",
        "_rotate",
        "_silu_and_mul",
        "_store_kv",
        "_summarise",
    }
    assert [each for each in compiled if each["shared"] > SHARED_BYTES[capability]] == []
    assert [each for each in compiled if each["local"] > MAX_SPILLED_BYTES] == []
