"""The script for real GPUs runs, as far as a CPU goes, and says so where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_kernels import TINY, KernelCheck, Shape
from benchmarks.gpu_model import ModelCheck
from tests.worker.gpu.gpu_fixtures import CPU, FakeDevice
from tests.worker.model_fixtures import write_tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_kernel_meets_its_reference(dtype: torch.dtype) -> None:
    check = KernelCheck(CPU, dtype, TINY, num_processors=2, action_us=None)
    rows = list(check.rows((Shape(6, 2, 64),)))
    assert len(rows) >= 14
    assert [row.name for row in rows if row.met is not True] == []


@pytest.mark.slow
def test_a_model_meets_transformers_and_itself_in_graphs(tmp_path: Path) -> None:
    check = ModelCheck(write_tiny_model(tmp_path), FakeDevice(), name="tiny")
    rows = [
        *check.logits(torch.float32, num_tokens=12),
        *check.graphs("float32", num_requests=2, num_tokens=3),
    ]
    assert [row.met for row in rows] == [True, True, True]


def test_without_a_gpu_nothing_is_checked_and_the_exit_code_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr == "gpu_check: torch finds no CUDA device here, nothing was checked\n"
