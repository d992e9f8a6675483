"""Packages import downwards only, and light ones stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from router.launch.shadowing import OUR_PACKAGES, shadowed_packages

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "triton", "numba"}


def loaded_by(*modules: str) -> set[str]:
    """Import modules in a fresh interpreter and return the top-level names that came with them."""
    code = f"import sys, {', '.join(modules)}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    return set(done.stdout.split())


def imports_of(folder: str) -> set[str]:
    """Return every module that the files of a folder import, wherever in the file."""
    found: set[str] = set()
    for file in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return found


def ours(modules: set[str]) -> set[str]:
    return {module for module in modules if module.partition(".")[0] in OUR_PACKAGES}


def test_the_foundation_imports_nothing_else_of_ours() -> None:
    imported = ours(imports_of("kvindex/foundation"))
    assert {m for m in imported if not m.startswith("kvindex.foundation")} == set()


def test_the_frontend_imports_nothing_else_of_the_engine() -> None:
    allowed = ("engine.frontend", "kvindex")
    imported = ours(imports_of("engine/frontend"))
    assert {m for m in imported if not m.startswith(allowed)} == set()


def test_the_router_knows_of_the_engine_its_frontend_alone() -> None:
    allowed = ("engine.frontend", "kvindex", "router")
    assert {m for m in ours(imports_of("router")) if not m.startswith(allowed)} == set()


def test_policies_are_pure() -> None:
    impure = {"aiohttp", "redis", "asyncio", "socket", "time", "random", "threading"}
    assert not {m.partition(".")[0] for m in imports_of("router/policy")} & impure


def modules_of(package: str) -> list[str]:
    files = sorted((REPOSITORY / package).rglob("*.py"))
    names = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_the_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(linter), "--no-cache"], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_engine_imports_neither_torch_nor_sockets_nor_an_event_loop() -> None:
    loaded = loaded_by(*modules_of("engine"))
    assert not loaded & (HEAVY | {"socket", "asyncio", "aiohttp", "redis", "zmq"})


def test_kvindex_imports_nothing_of_ours() -> None:
    assert not loaded_by(*modules_of("kvindex")) & {"engine", "worker", "router", "sim"}


def test_the_control_plane_needs_no_torch() -> None:
    assert not loaded_by(*modules_of("router")) & (HEAVY | {"worker", "sim"})


def test_a_replica_starts_without_torch() -> None:
    loaded = loaded_by("worker.server.lifecycle", "worker.core.process", "worker.model.prepare")
    assert not loaded & HEAVY


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_no_module_bears_the_name_of_a_top_level_package(package: str) -> None:
    twins = [
        path
        for other in OUR_PACKAGES
        for path in (REPOSITORY / other).rglob(f"{package}*")
        if path.stem == package and path.parent != REPOSITORY
    ]
    assert twins == []


def test_our_packages_are_the_ones_that_are_imported() -> None:
    assert shadowed_packages() == {}
