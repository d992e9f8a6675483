"""A container file carried out without containers: its files, its pip commands, its command line.

What a base image brings (Python, a user of its own) is this machine's. torch comes from the index
that pip is set up with, in the place of the one that the file names for its builds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

DOCKER = Path(__file__).resolve().parents[2] / "deploy" / "docker"
REPOSITORY = DOCKER.parents[1]
_TORCH_INDEX = "--index-url ${TORCH_INDEX} "
_BUILD_OUTPUT = shutil.ignore_patterns("__pycache__")


class Image:
    """What one container file says, and the folder in which it is carried out."""

    def __init__(self, name: str, folder: Path) -> None:
        text = (DOCKER / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
        self._copied = re.findall(r"^COPY (.+) \S+$", text, re.M)
        self._steps = [
            step.strip()
            for run in re.findall(r"^RUN (.+)$", text, re.M)
            for step in run.split("&&")
        ]
        entry, arguments = (
            json.loads(re.findall(rf"^{word} (.+)$", text, re.M)[0])
            for word in ("ENTRYPOINT", "CMD")
        )
        self.entry: list[str] = entry
        self.arguments: list[str] = arguments
        self._app = folder / "app"
        self._home = folder / "home"
        self.binaries = folder / "venv" / "bin"

    def build(self) -> None:
        """Copy what is copied and install what is installed; AssertionError with pip's words."""
        self._app.mkdir(parents=True)
        self._home.mkdir()
        for name in " ".join(self._copied).split():
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, self._app / name, ignore=_BUILD_OUTPUT)
            else:
                shutil.copy(source, self._app)
        subprocess.run([sys.executable, "-m", "venv", self.binaries.parent], check=True)
        installs = [step for step in self._steps if step.startswith("pip ")]
        assert installs, self._steps
        for step in installs:
            command = step.replace(_TORCH_INDEX, "")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self._app,
                env={**os.environ, "PATH": self._path(), "PIP_NO_COMPILE": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}"

    def start(
        self, arguments: list[str], *, config: Path, environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start the image's command with a configuration mounted where it looks for one."""
        words = [
            str(config) if word == "/etc/prefixfleet/fleet.yaml" else word
            for word in [*self.entry, *arguments]
        ]
        words[0] = str(self.binaries / words[0])
        with log.open("wb") as output:
            return subprocess.Popen(
                words,
                cwd=self._home,
                env={"PATH": self._path(), "HOME": str(self._home), **environment},
                stdout=output,
                stderr=output,
            )

    def remove(self) -> None:
        """Delete what was built."""
        shutil.rmtree(self.binaries.parents[1])

    def can_import(self, module: str) -> bool:
        """Whether a module is installed there."""
        command = [str(self.binaries / "python"), "-P", "-c", f"import {module}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _path(self) -> str:
        return f"{self.binaries}:{os.environ['PATH']}"
