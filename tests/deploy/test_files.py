"""Container files, compose file, alerts and dashboard name what exists."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.messages import EngineStats, TenantStats
from kvindex.ingest_state import IngestCounters
from router.cli import COMMANDS
from router.launch.config import load_fleet_config
from router.observe.metrics import GatewayMetrics
from router.tls import WARN_BEFORE_DAYS
from worker.server.metrics import FrontMetrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())[
    "groups"
][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/prefixfleet.json").read_text())
_METRIC = re.compile(r"\b(prefixfleet_\w+|vllm:\w+)")


@cache
def exported() -> set[str]:
    """Return the name of every series that a gateway or a replica may export."""
    front = FrontMetrics("model").render(
        [EngineStats()],
        {"acme": TenantStats()},
        mode="EXACT",
        num_active=0,
        ingest={0: IngestCounters()},
    )
    text = (GatewayMetrics().render() + front).decode()
    names: set[str] = set()
    for kind, name in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M):
        names.add(kind)
        if name == "histogram":
            names |= {f"{kind}_bucket", f"{kind}_sum", f"{kind}_count"}
    return names


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_reads_metrics_that_exist(alert: dict[str, Any]) -> None:
    assert set(_METRIC.findall(alert["expr"])) <= exported()
    assert set(alert["annotations"]) == {"summary", "description"}


def test_the_alerts_cover_trust_regret_shedding_gaps_and_latency() -> None:
    names = {alert["alert"] for alert in ALERTS}
    wanted = {"ReplicaNotExact", "HitRegret", "Shedding", "EventGaps", "IndexSlow"}
    assert {f"Prefixfleet{name}" for name in wanted} <= names


def test_every_alert_is_explained_where_operators_look() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    explained = re.findall(r"^\| `(Prefixfleet\w+)` \|", page, re.M)
    assert explained == [alert["alert"] for alert in ALERTS]


def test_the_alert_of_a_certificate_comes_when_the_log_begins_to_warn() -> None:
    (alert,) = [alert for alert in ALERTS if alert["alert"] == "PrefixfleetCertificateExpires"]
    assert alert["expr"].endswith(f" - time() < {WARN_BEFORE_DAYS} * 86400")


def test_every_panel_reads_metrics_that_exist() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert set(_METRIC.findall(target["expr"])) <= exported(), panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_compose_file_starts_what_the_command_line_knows() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("engine-0", "engine-1"):
        words = compose["services"][name]["command"]
        assert words[words.index("--replica-id") + 1] == name
        assert words[words.index("--advertised-url") + 1] == f"http://{name}:8100"
    shown = load_fleet_config(DEPLOY / "fleet.yaml", {}).shown()
    assert shown["redis"]["index_url"] == "redis://redis:6379/0"


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_a_container_file_copies_every_package_and_runs_a_known_command(name: str) -> None:
    text = (DEPLOY / "docker" / f"{name}.Dockerfile").read_text()
    for package in ("kvindex", "engine", "worker", "router", "sim", "configs"):
        assert f"COPY {package} {package}" in text
    words: list[str] = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[0])
    assert words[0] == "prefixfleet"
    assert words[1] in COMMANDS
    assert "USER 10001" in text
