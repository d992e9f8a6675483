"""The chart renders to manifests that Kubernetes takes, and to settings that we take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from router.launch.config import load_fleet_config
from tests.deploy.helm import helm, render

pytestmark = pytest.mark.skipif(helm() is None, reason="needs helm")

LLAMA: dict[str, Any] = {
    "name": "llama",
    "model": "/models/llama",
    "gpus": 2,
    "args": ["--max-num-seqs", "256"],
    "resources": {"limits": {"memory": "64Gi"}},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything on": {
        "gateway": {"autoscaling": {"enabled": True}, "config": {"default_policy": "least_load"}},
        "serviceMonitor": {"enabled": True},
        "engines": [LLAMA, {"name": "small", "model": "demo"}],
        "engineConfig": {"max_num_seqs": 128},
        "workerConfig": {"dtype": "float32"},
    },
    "everything of one's own": {
        "redis": {
            "url": "rediss://managed.example:6380/0",
            "stateUrl": "rediss://managed.example:6380/1",
        },
        "existingSecret": "mine",
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "TLS": {
        "gateway": {"tls": {"secretName": "fleet-cert", "clientCA": True}},
        "serviceMonitor": {"enabled": True},
    },
}


def manifests(values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(render(values or {})) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


@pytest.mark.parametrize("case", CASES)
def test_every_manifest_is_valid(case: str) -> None:
    documents = manifests(CASES[case])
    for document in documents:
        if document["kind"] != "ServiceMonitor":  # A custom resource has no schema there.
            kubernetes_validate.validate(document, "1.31", strict=True)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_is_one_that_loads(case: str, tmp_path: Path) -> None:
    (config,) = of_kind(manifests(CASES[case]), "ConfigMap")
    file = tmp_path / "fleet.yaml"
    file.write_text(config["data"]["fleet.yaml"])
    shown = load_fleet_config(file, {}).shown()
    assert (shown["router"]["port"], shown["router"]["admin_port"]) == (8000, 8001)
    assert shown["redis"]["index_url"].startswith(("redis://fleet-redis", "rediss://managed"))


def test_a_replica_joins_under_the_name_that_gateways_reach_it_by() -> None:
    (engine,) = [d for d in of_kind(manifests(), "StatefulSet") if "demo" in d["metadata"]["name"]]
    container = engine["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == [
        "demo",
        "-c",
        "/etc/prefixfleet/fleet.yaml",
        "--join",
        "--replica-id",
        "$(POD_NAME)",
        "--advertised-url",
        "http://$(POD_NAME).fleet-demo.default.svc:8100",
    ]
    assert engine["spec"]["serviceName"] == "fleet-demo"


def test_gpus_become_a_limit() -> None:
    documents = manifests({"engines": [LLAMA]})
    (engine,) = [d for d in of_kind(documents, "StatefulSet") if "llama" in d["metadata"]["name"]]
    container = engine["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "64Gi"}
    assert container["args"][-2:] == ["--max-num-seqs", "256"]


def test_no_pod_runs_as_root_or_gets_the_clusters_token() -> None:
    documents = manifests(CASES["everything on"])
    for document in of_kind(documents, "StatefulSet") + of_kind(documents, "Deployment"):
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_only_gateways_reach_replicas() -> None:
    policies = of_kind(manifests(), "NetworkPolicy")
    (engines,) = [p for p in policies if p["metadata"]["name"] == "fleet-engines"]
    (rule,) = engines["spec"]["ingress"]
    labels = rule["from"][0]["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "gateway"


def gateway_pod(values: Mapping[str, Any]) -> dict[str, Any]:
    (gateway,) = of_kind(manifests(values), "Deployment")
    pod: dict[str, Any] = gateway["spec"]["template"]["spec"]
    return pod


def test_a_secret_becomes_the_certificate_that_the_gateway_is_told_to_serve(
    tmp_path: Path,
) -> None:
    (config,) = of_kind(manifests(CASES["TLS"]), "ConfigMap")
    file = tmp_path / "fleet.yaml"
    file.write_text(config["data"]["fleet.yaml"])
    folder = "/etc/prefixfleet-tls"
    assert load_fleet_config(file, {}).shown()["router"]["tls"] == {
        "certificate": f"{folder}/tls.crt",
        "key": f"{folder}/tls.key",
        "client_ca": f"{folder}/ca.crt",
    }
    pod = gateway_pod(CASES["TLS"])
    assert {"name": "tls", "secret": {"secretName": "fleet-cert"}} in pod["volumes"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "tls", "mountPath": folder, "readOnly": True} in mounts


@pytest.mark.parametrize(
    ("tls", "asked"),
    [
        ({}, {"port": "http", "scheme": "HTTP"}),
        ({"secretName": "fleet-cert"}, {"port": "http", "scheme": "HTTPS"}),
        ({"secretName": "fleet-cert", "clientCA": True}, {"port": "admin", "scheme": "HTTPS"}),
    ],
)
def test_probes_reach_the_gateway_whatever_it_asks_of_clients(
    tls: dict[str, Any], asked: dict[str, str]
) -> None:
    container = gateway_pod({"gateway": {"tls": tls}})["containers"][0]
    for probe, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, **asked}
