"""Every configuration that we ship is one that we accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import TenantConfig
from router.launch.config import SECTIONS, demo_config_file, load_fleet_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
"""Those of fleets; what is in configs/sim are plans of replays (tests/sim/test_plans.py)."""


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_a_shipped_configuration_loads(file: Path) -> None:
    assert set(load_fleet_config(file, {}).shown()) == set(SECTIONS)


def test_the_demo_has_two_tenants_whose_keys_are_not_in_the_file() -> None:
    tenants = load_fleet_config(demo_config_file(), {}).entries("tenants", TenantConfig)
    assert [(tenant.name, tenant.keys) for tenant in tenants] == [("acme", ()), ("globex", ())]
