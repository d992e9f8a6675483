"""What comes over from a LiteLLM proxy, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.cli import main
from router.config import StaticReplica, TenantConfig
from router.launch.config import load_fleet_config
from router.launch.litellm_import import import_litellm
from tests.router.fake_replica import key_hash

HASH = key_hash("sk-their-key")
CONFIG: dict[str, Any] = {
    "model_list": [
        {
            "model_name": "llama",
            "litellm_params": {
                "model": "hosted_vllm/meta/llama-3",
                "api_base": "http://gpu-1:8000/v1",
                "api_key": "os.environ/VLLM_KEY",
                "rpm": 100,
            },
        },
        {
            "model_name": "meta/llama-3",
            "litellm_params": {"model": "openai/meta/llama-3", "api_base": "http://gpu-2:8000/v1"},
        },
        {"model_name": "gpt-4o", "litellm_params": {"model": "openai/gpt-4o", "api_key": "sk-x"}},
    ],
    "general_settings": {"master_key": "sk-1234"},
    "router_settings": {"routing_strategy": "least-busy"},
}
TEAMS: list[dict[str, Any]] = [
    {
        "team_id": "t1",
        "team_alias": "Data Science",
        "models": ["llama"],
        "rpm_limit": 100,
        "tpm_limit": 50_000,
        "max_parallel_requests": 8,
        "max_budget": 20.0,
    },
    {"team_id": "t2", "team_alias": "web", "models": [], "blocked": True},
]
KEYS: list[dict[str, Any]] = [
    {
        "token": HASH,
        "key_alias": "nightly",
        "team_id": "t1",
        "user_id": "ada",
        "rpm_limit": 10,
        "expires": "2027-01-01T00:00:00+00:00",
    },
    {"token": "sk-in-clear", "team_id": None, "models": ["all-team-models"], "blocked": True},
]


def test_models_teams_limits_and_key_hashes_come_over() -> None:
    done = import_litellm(CONFIG, teams=TEAMS, keys=KEYS)
    assert done.config == {
        "router": {
            "replicas": [
                {
                    "url": "http://gpu-1:8000/v1",
                    "kind": "vllm",
                    "api_key": {"env": "VLLM_KEY"},
                },
                {"url": "http://gpu-2:8000/v1"},
            ]
        },
        "tenants": [
            {
                "name": "Data-Science",
                "keys": [
                    {
                        "hash": HASH,
                        "alias": "nightly",
                        "owner": "ada",
                        "limits": {"requests_per_minute": 10},
                        "expires_at": 1798761600.0,
                    }
                ],
                "aliases": {"llama": "meta/llama-3"},
                "models": [],
                "limits": {
                    "requests_per_minute": 100,
                    "tokens_per_minute": 50_000,
                    "max_parallel": 8,
                },
            },
            {
                "name": "web",
                "keys": [],
                "aliases": {"llama": "meta/llama-3"},
                "blocked": True,
            },
            {
                "name": "no-team",
                "keys": [{"hash": key_hash("sk-in-clear"), "alias": "sk-in-cl", "blocked": True}],
                "aliases": {"llama": "meta/llama-3"},
            },
        ],
    }


def test_what_has_no_counterpart_is_named() -> None:
    keys = [{**KEYS[0], "guardrails": ["pii"], "spend": 3.5, "max_budget": None}]
    assert import_litellm(CONFIG, teams=TEAMS, keys=keys).report == [
        "model_list[0].litellm_params.rpm: has no counterpart",
        "model_list[2] (gpt-4o): served elsewhere (it has no api_base); not taken over",
        "teams[0] (Data Science): is called Data-Science here",
        "teams[0].max_budget: budgets are tokens here; set tokens_per_day or tokens_per_month",
        "keys[0] (nightly).guardrails: has no counterpart",
        "general_settings.master_key: the admin key is in the run directory instead",
        "router_settings.routing_strategy: not taken over",
    ]


def test_the_command_writes_a_file_that_a_gateway_starts_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.yaml": CONFIG, "teams.json": TEAMS, "keys.json": {"keys": KEYS}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    output = tmp_path / "prefixfleet.yaml"
    words = [f"--{name}={tmp_path / name}.json" for name in ("teams", "keys")]
    argv = ["config", "import-litellm", str(tmp_path / "config.yaml"), *words, f"--output={output}"]
    assert main(argv) == 0
    assert "not taken over: router_settings.routing_strategy" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_KEY", "secret")
    config = load_fleet_config(output, {})
    tenants = config.entries("tenants", TenantConfig)
    assert [(t.name, len(t.keys)) for t in tenants] == [
        ("Data-Science", 1),
        ("web", 0),
        ("no-team", 1),
    ]
    urls = [
        StaticReplica(**r).base_url
        for r in yaml.safe_load(output.read_text())["router"]["replicas"]
    ]
    assert urls == ["http://gpu-1:8000", "http://gpu-2:8000"]


def test_a_file_of_another_shape_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("- 1")
    assert main(["config", "import-litellm", str(file)]) == 2
    assert f"{file}: must be a mapping" in capsys.readouterr().err
    file.write_text("model_list: [{model_name: x}]")
    assert main(["config", "import-litellm", str(file)]) == 2
    assert "model_list[0]: needs model_name and litellm_params" in capsys.readouterr().err
