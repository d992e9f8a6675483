"""What a replay takes from a fleet's configuration is what the fleet itself runs with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import ConfigError
from kvindex.foundation.tls import Trust
from router.assembly import Gateway
from router.config import GatewaySpec, RouterConfig
from router.launch.config import SECTIONS, load_fleet_config
from sim.live import fleet_settings
from sim.live.fleet_settings import find_fleet, read_settings


def config_file(folder: Path, settings: dict[str, object]) -> Path:
    file = folder / "fleet.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    return file


def test_the_sections_are_the_launchers() -> None:
    assert fleet_settings.SECTIONS == SECTIONS


def test_planner_and_policy_are_those_of_the_gateway(tmp_path: Path) -> None:
    file = config_file(
        tmp_path,
        {
            "router": {
                "first_token_timeout_s": 7.0,
                "saturation_s": None,
                "max_siblings": 3,
                "queue": {"accept_s": 0.25},
                "default_policy": "least_load",
            },
            "engine": {"block_size": 32},
            "fleet": {"replicas": 3, "executor": "scripted", "scripted": {"num_blocks": 65}},
        },
    )
    settings = read_settings(file)
    router = load_fleet_config(file, {}).section("router", RouterConfig)
    spec = GatewaySpec(router=router, fleet_secret="s" * 16, admin_key="a" * 16)
    gateway = Gateway(spec, id="g", clock=SystemClock(), stores=None)
    assert settings.planner == gateway.planner._config
    assert settings.policy == "least_load"
    assert (settings.replicas, settings.blocks, settings.engine.block_size) == (3, 64, 32)


def test_without_a_configuration_or_a_running_fleet_the_remedy_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with -c FILE"):
        read_settings(None)
    nowhere = {"url": None, "key": None, "admin_url": None, "admin_key": None}
    with pytest.raises(ConfigError, match="start the fleet, or say where one is with --url"):
        find_fleet(tmp_path, **nowhere)
    file = {"url": "u", "admin_url": "a", "admin_key": "k", "keys": {}, "ready": False}
    (tmp_path / "fleet.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match="no fleet runs there"):
        find_fleet(tmp_path, **nowhere)


def test_an_url_is_taken_in_both_spellings(tmp_path: Path) -> None:
    found = find_fleet(
        tmp_path, url="http://host:8000/v1/", key="sk", admin_url="http://host:8001/", admin_key="a"
    )
    assert (found.url, found.admin_url) == ("http://host:8000", "http://host:8001")


def test_a_fleet_of_this_machine_is_trusted_by_its_own_certificate(tmp_path: Path) -> None:
    tls = {"certificate": "/srv/fleet.pem", "name": "fleet.example"}
    file = {"url": "u", "admin_url": "a", "admin_key": "k", "keys": {}, "ready": True, "tls": tls}
    (tmp_path / "fleet.json").write_text(json.dumps(file))
    here = find_fleet(tmp_path, url=None, key=None, admin_url=None, admin_key=None)
    assert here.trust == Trust(certificate="/srv/fleet.pem")
    there = find_fleet(
        tmp_path, url="https://host", key=None, admin_url=None, admin_key=None, ca="ca.pem"
    )
    assert there.trust == Trust(ca="ca.pem")
