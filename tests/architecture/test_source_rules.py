"""Rules of the source that a tool can check: docstrings, sizes, plain package files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("kvindex", "engine", "worker", "router", "sim", "tests", "benchmarks")
MAX_LINES = 500


def modules() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_says_what_it_is_and_stays_readable(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    assert len(text.splitlines()) <= MAX_LINES


def test_package_files_hold_a_docstring_only() -> None:
    for path in modules():
        if path.name == "__init__.py":
            assert len(ast.parse(path.read_text()).body) == 1, name_of(path)


def test_every_test_folder_is_a_package() -> None:
    """Else two test files of one name collide."""
    for path in (REPOSITORY / "tests").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), name_of(path.parent)


def test_no_name_says_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "helper", "misc", "base", "impl"}
    assert [name_of(path) for path in modules() if path.stem in empty] == []
