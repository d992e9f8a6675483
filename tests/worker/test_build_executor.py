"""What must be settled before torch is loaded into the process of a model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_BUILD = """
import os, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise SystemExit

sys.meta_path.insert(0, Watch())

from engine.config import EngineConfig
from worker.core.spec import CoreSpec
from worker.executors.build import build_executor

build_executor(CoreSpec(replica_id="r", engine=EngineConfig(), model_folder="/model"))
"""


@pytest.mark.parametrize(("given", "found"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_know_how_long_to_spin_before_torch_starts_them(
    given: dict[str, str], found: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD],
        capture_output=True,
        text=True,
        check=True,
        env=environment | given,
    )
    assert done.stdout.split() == [found]
