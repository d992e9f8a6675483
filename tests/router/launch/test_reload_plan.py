"""What a changed configuration means for a running fleet, setting by setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvindex.foundation.errors import ConfigError
from router.config import ConfigSource, RouterConfig, TenantConfig
from router.launch.config import load_fleet_config
from router.launch.model_folder import PreparedModel
from router.launch.plan import FleetPlan, make_plan
from router.launch.reload_plan import ReloadPlan, plan_reload
from router.launch.run_dir import RunDirectory
from router.launch.secrets import FleetSecrets

SECRETS = FleetSecrets(fleet_secret="f" * 16, internal_token="t" * 16, admin_key="a" * 16)
MODEL = PreparedModel(folder="/models/tiny", model="tiny", dtype="float32")
PORTS = {"replica-0": 9100, "replica-1": 9101}


def plan(folder: Path, config: dict[str, Any], *, ports: dict[str, int] = PORTS) -> FleetPlan:
    file = folder / "fleet.yaml"
    file.write_text(json.dumps(config))
    loaded = load_fleet_config(file, {})
    return make_plan(
        loaded,
        source=ConfigSource(file=str(file)),
        run_dir=RunDirectory(folder / "run"),
        router=loaded.section("router", RouterConfig),
        tenants=tuple(loaded.entries("tenants", TenantConfig)),
        secrets=SECRETS,
        model=MODEL,
        ports=ports,
    )


def reload(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> ReloadPlan:
    return plan_reload(plan(folder, before), plan(folder, after), keys={}, known_keys={})


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ({}, {}, []),
        ({}, {"fleet": {"replicas": 1}}, ["to end: replica-1"]),
        ({}, {"fleet": {"replicas": 4}}, ["to start: replica-2, replica-3"]),
        (
            {"fleet": {"replicas": 1}},
            {"tenants": [{"name": "a"}]},
            ["at once: tenants", "to start: replica-1"],
        ),
        (
            {"fleet": {"replicas": 1}},
            {"fleet": {"replicas": 1}, "engine": {"max_num_seqs": 8}, "worker": {"lease_s": 20.0}},
            ["to restart: replica-0 (engine.max_num_seqs, worker.lease_s)"],
        ),
        (
            {"fleet": {"replicas": 1}},
            {"fleet": {"replicas": 1, "executor": "scripted"}},
            ["to restart: replica-0 (fleet.executor)"],
        ),
        ({}, {"router": {"max_attempts": 5}}, ["to restart: the gateway (router.max_attempts)"]),
        (
            {},
            {"router": {"default_policy": "session"}, "fleet": {"restart_budget": 9}},
            ["at once: router.default_policy, fleet.restart_budget"],
        ),
        ({}, {"worker": {"port": 8500}}, []),
    ],
)
def test_what_differs_is_named_with_what_is_done_about_it(
    before: dict[str, Any], after: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    assert list(reload(tmp_path, before, after).lines()) == lines


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"router": {"port": 1, "processes": 2}}, "router.port, router.processes: cannot change"),
        ({"redis": {"call_timeout_s": 5.0}}, "redis: cannot change"),
        ({"fleet": {"run_dir": "/elsewhere"}}, "fleet.run_dir: cannot change"),
        ({"engine": {"block_size": 32}}, "engine.block_size: all replicas that serve tiny"),
    ],
)
def test_what_a_running_fleet_cannot_change_is_refused(
    after: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        reload(tmp_path, {}, after)


def test_another_name_makes_another_pool(tmp_path: Path) -> None:
    after = {"engine": {"block_size": 32}, "worker": {"served_model_name": "other"}}
    wanted = reload(tmp_path, {}, after)
    assert [changed for _, changed in wanted.restarts] == [
        ("worker.served_model_name", "engine.block_size")
    ] * 2


def test_a_replica_keeps_its_port_and_new_ones_get_free_ones(tmp_path: Path) -> None:
    after = plan(tmp_path, {"fleet": {"replicas": 3}, "worker": {"port": 9100}})
    ports = [replica.port for replica in after.replicas]
    assert ports[:2] == [9100, 9101]
    assert ports[2] > 9101


def test_a_new_key_restarts_the_gateway(tmp_path: Path) -> None:
    keys = {"acme": "sk-1", "globex": "sk-2"}
    known = {"acme": "sk-1"}
    wanted = plan_reload(plan(tmp_path, {}), plan(tmp_path, {}), keys=keys, known_keys=known)
    assert list(wanted.lines()) == ["to restart: the gateway (a key for tenant globex)"]
