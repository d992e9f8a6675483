"""Fleets for the end-to-end tests; each is started by the real command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet_process import FleetProcess, scripted_config, tiny_folder
from tests.redis_server import private_redis

__all__ = ["private_redis"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the scripted executor can serve."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FleetProcess]:
    """Two scripted replicas behind a gateway, shared by the tests of one file."""
    running = FleetProcess(tmp_path_factory.mktemp("fleet"), scripted_config(tiny_model)).start()
    yield running
    running.kill()
